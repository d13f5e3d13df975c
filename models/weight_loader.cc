#include "models/weight_loader.h"

#include "base/mapped_file.h"
#include "base/status.h"
#include "kernels/formats/matrix_slice.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/shared_conversion.h"

namespace treadle {
namespace {

// The layer's rows that this rank holds.
std::vector<int32_t> PartRows(const WeightLoader::LinearSpec& spec) {
  std::vector<int32_t> rows;
  const auto add = [&](ShardRange range) {
    for (int64_t row = range.begin; row < range.end; ++row) {
      rows.push_back(static_cast<int32_t>(row));
    }
  };
  if (spec.rows.empty()) add({0, spec.n});
  for (const ShardRange& range : spec.rows) add(range);
  return rows;
}

}  // namespace

WeightLoader::WeightLoader(const Checkpoint& checkpoint, Backend& backend,
                           const LoadOptions& options)
    : checkpoint_(checkpoint), backend_(backend), options_(options) {
  for (const StoredTensor& tensor : checkpoint.tensors()) total_ += tensor.bytes;
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> WeightLoader::PackPart(MatrixSource whole,
                                                                     const LinearSpec& spec) {
  whole.of_layer = RoleOf(spec.name + ".weight") == MatrixRole::kLayer;
  const std::vector<int32_t> rows = PartRows(spec);
  const bool all_columns =
      spec.columns.empty() || (spec.columns.size() == 1 && spec.columns[0].size() == spec.k);
  // Rows as they are stored, in memory of the model's own.
  if (spec.lookup_only && !whole.format->apart() && !whole.transposed && whole.row_order.empty() &&
      all_columns && spec.rows.size() <= 1) {
    const ShardRange range = spec.rows.empty() ? ShardRange{0, spec.n} : spec.rows[0];
    const std::byte* const begin = whole.data + range.begin * whole.format->RowBytes(whole.k);
    const auto kept = std::make_shared<std::vector<std::byte>>(
        begin, begin + whole.format->MatrixBytes(range.size(), whole.k));
    whole.data = kept->data();
    whole.n = range.size();
    whole.file = kept;
    return backend_.Pack(whole);
  }
  if (std::ssize(rows) == spec.n && all_columns) return backend_.Pack(whole);
  std::vector<MatrixSlice> parts;
  for (const ShardRange& columns :
       all_columns ? std::vector{ShardRange{0, spec.k}} : spec.columns) {
    auto part = SliceMatrix(whole, rows, columns.begin, columns.end);
    if (!part.ok()) {
      return InvalidArgument(checkpoint_.path(), ": tensor '", spec.name,
                             ".weight': ", std::string(part.status().message()));
    }
    parts.push_back(*std::move(part));
  }
  const MatrixSlice part = JoinColumns(std::move(parts));
  MatrixSource source = part.source();
  source.of_layer = whole.of_layer;
  return backend_.Pack(source);
}

absl::StatusOr<WeightLoader::PackedMatrices> WeightLoader::PackParts(const MatrixSource& whole,
                                                                     const LinearSpec& spec,
                                                                     bool apart) {
  PackedMatrices matrices;
  LinearSpec part = spec;
  for (size_t i = 0; i < (apart ? spec.rows.size() : 1); ++i) {
    if (apart) part.rows = {spec.rows[i]};
    TREADLE_ASSIGN_OR_RETURN(matrices.emplace_back(), PackPart(whole, part));
  }
  return matrices;
}

absl::StatusOr<WeightLoader::PackedMatrices> WeightLoader::Pack(const StoredTensor& tensor,
                                                                const LinearSpec& spec,
                                                                bool parts_apart) {
  const bool apart = tensor.format->apart();
  const auto set_outliers = [&](MatrixConstants& constants) {
    if (options_.outlier_threshold) constants.outlier_threshold = *options_.outlier_threshold;
    constants.outlier_rule = options_.outlier_rule;
  };
  MatrixConstants constants;
  TREADLE_ASSIGN_OR_RETURN(MatrixSource source, SourceOf(tensor, spec.n, spec.k, constants));
  source.row_order = spec.row_order;
  source.transposed = spec.transposed && !apart;
  set_outliers(constants);
  const QuantizeSpec* to = options_.weights.For(tensor, checkpoint_);
  if (to == nullptr || (to->format == tensor.format && !apart)) {
    return PackParts(source, spec, parts_apart);
  }

  const std::vector<int32_t> folder_rows = OrderBetween(spec.row_order, spec.folder_order);
  source.row_order = folder_rows;
  const auto pack = [&](const QuantizedMatrix& quantized) {
    MatrixSource made = quantized.source();
    made.row_order = spec.folder_order;
    return PackParts(made, spec, parts_apart);
  };
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), Str(checkpoint_.path(), ": tensor '", tensor.name, "' to ",
                                           to->name, ": ", std::string(status.message())));
  };
  if (const absl::Status status = CheckMatrixSource(source); !status.ok()) return named(status);
  const auto convert = [&]() -> absl::StatusOr<QuantizedMatrix> {
    const int ranks = options_.conversion == nullptr ? 1 : options_.conversion->ranks();
    const ParallelFor parallel_for = SplitOverThreads(ranks * options_.threads);
    const std::vector<float> values = DecodeMatrix(source, parallel_for);
    auto quantized = Quantize(*to, values, spec.n, spec.k, parallel_for);
    if (!quantized.ok()) return named(quantized.status());
    quantized->constants.outlier_threshold = constants.outlier_threshold;
    set_outliers(quantized->constants);
    return quantized;
  };
  if (options_.conversion == nullptr) {
    TREADLE_ASSIGN_OR_RETURN(const QuantizedMatrix quantized, convert());
    return pack(quantized);
  }
  PackedMatrices packed;
  TREADLE_RETURN_IF_ERROR(options_.conversion->Use(
      options_.shard.rank, convert, [&](const QuantizedMatrix& quantized) -> absl::Status {
        TREADLE_ASSIGN_OR_RETURN(packed, pack(quantized));
        return absl::OkStatus();
      }));
  return packed;
}

absl::StatusOr<Linear> WeightLoader::LoadLinear(const LinearSpec& spec) {
  TREADLE_ASSIGN_OR_RETURN(std::vector<Linear> linears, Load(spec, /*apart=*/false));
  return std::move(linears[0]);
}

absl::StatusOr<std::vector<Linear>> WeightLoader::LoadLinears(const LinearSpec& spec) {
  TREADLE_CHECK(!spec.bias);
  return Load(spec, /*apart=*/true);
}

absl::StatusOr<std::vector<Linear>> WeightLoader::Load(const LinearSpec& spec, bool apart) {
  const std::string name = spec.name + ".weight";
  const StoredTensor* found = checkpoint_.Find(name);
  const bool transposed = spec.transposed && !(found != nullptr && found->format->apart());
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor,
                           transposed ? checkpoint_.Require(name, {spec.k, spec.n})
                                      : checkpoint_.Require(name, {spec.n, spec.k}));
  TREADLE_ASSIGN_OR_RETURN(PackedMatrices weights, Pack(*tensor, spec, apart));
  Consumed(*tensor);
  Buffer bias;
  if (spec.bias) {
    TREADLE_ASSIGN_OR_RETURN(bias, LoadBias(spec.name + ".bias", spec));
  }
  std::vector<Linear> linears;
  for (auto& weight : weights) {
    weight_bytes_ += weight->bytes();
    linears.emplace_back(std::move(weight), std::move(bias), linears_++);
  }
  return linears;
}

absl::StatusOr<Buffer> WeightLoader::LoadBias(const std::string& name, const LinearSpec& spec) {
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, checkpoint_.Require(name, {spec.n}));
  const std::vector<float> stored = DecodeVector(*tensor);
  Consumed(*tensor);
  if (!spec.columns.empty() && options_.shard.rank > 0) return Buffer();
  std::vector<float> values;
  for (const int32_t row : PartRows(spec)) {
    values.push_back(stored[spec.row_order.empty() ? row : spec.row_order[row]]);
  }
  return Upload(values);
}

absl::StatusOr<Buffer> WeightLoader::LoadVector(const std::string& name, int64_t n, float more,
                                                float scale, ShardRange part) {
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, checkpoint_.Require(name, {n}));
  std::vector<float> values = DecodeVector(*tensor);
  for (float& value : values) value = (value + more) * scale;
  Consumed(*tensor);
  if (part.size() == 0) return Upload(values);
  return Upload(std::span(values).subspan(part.begin, part.size()));
}

absl::StatusOr<float> WeightLoader::LoadNumber(const std::string& name) {
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, checkpoint_.Require(name, {1}));
  Consumed(*tensor);
  return DecodeVector(*tensor)[0];
}

absl::StatusOr<Buffer> WeightLoader::Upload(std::span<const float> values) {
  TREADLE_ASSIGN_OR_RETURN(Buffer buffer, backend_.Allocate(values.size_bytes()));
  backend_.CopyToDevice(buffer.data(), values.data(), values.size_bytes());
  weight_bytes_ += values.size_bytes();
  return buffer;
}

void WeightLoader::Consumed(const StoredTensor& tensor) {
  DropMappedPages(tensor.data, tensor.bytes);
  consumed_ += tensor.bytes;
  if (!options_.progress) return;
  options_.progress(static_cast<double>(consumed_) / static_cast<double>(total_));
}

void WeightLoader::Finish() const {
  if (options_.progress) options_.progress(1);
}

}  // namespace treadle
