#include "models/weight_loader.h"

#include "kernels/status.h"
#include "models/mapped_file.h"
#include "models/parallel_split.h"

namespace treadle {

WeightLoader::WeightLoader(const Checkpoint& checkpoint, Backend& backend,
                           const LoadOptions& options)
    : checkpoint_(checkpoint), backend_(backend), options_(options) {
  for (const StoredTensor& tensor : checkpoint.tensors()) total_ += tensor.bytes;
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> WeightLoader::Pack(const StoredTensor& tensor,
                                                                 const LinearSpec& spec) {
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
  const QuantizeSpec* to = options_.weights.For(tensor.name, checkpoint_.config().tied_head);
  if (to == nullptr || (to->format == tensor.format && !apart)) return backend_.Pack(source);

  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), Str(checkpoint_.path(), ": tensor '", tensor.name, "' to ",
                                           to->name, ": ", std::string(status.message())));
  };
  if (const absl::Status status = CheckMatrixSource(source); !status.ok()) return named(status);
  const ParallelFor parallel_for = SplitOverThreads(options_.threads);
  std::vector<float> values = DecodeMatrix(source, parallel_for);
  auto quantized = Quantize(*to, values, spec.n, spec.k, parallel_for);
  if (!quantized.ok()) return named(quantized.status());
  values = {};
  quantized->constants.outlier_threshold = constants.outlier_threshold;
  set_outliers(quantized->constants);
  return backend_.Pack(quantized->source());
}

absl::StatusOr<Linear> WeightLoader::LoadLinear(const LinearSpec& spec) {
  const std::string name = spec.name + ".weight";
  const StoredTensor* found = checkpoint_.Find(name);
  const bool transposed = spec.transposed && !(found != nullptr && found->format->apart());
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor,
                           transposed ? checkpoint_.Require(name, {spec.k, spec.n})
                                      : checkpoint_.Require(name, {spec.n, spec.k}));
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<PackedMatrix> weight, Pack(*tensor, spec));
  weight_bytes_ += weight->bytes();
  Consumed(*tensor);
  Buffer bias;
  const std::string bias_name = spec.name + ".bias";
  if (spec.bias == Bias::kRequired ||
      (spec.bias == Bias::kIfPresent && checkpoint_.Find(bias_name) != nullptr)) {
    TREADLE_ASSIGN_OR_RETURN(bias, LoadVector(bias_name, spec.n, spec.row_order));
  }
  return Linear(std::move(weight), std::move(bias));
}

absl::StatusOr<Buffer> WeightLoader::LoadVector(const std::string& name, int64_t n,
                                                std::span<const int32_t> row_order) {
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, checkpoint_.Require(name, {n}));
  std::vector<float> values = DecodeVector(*tensor);
  if (!row_order.empty()) {
    const std::vector<float> stored = values;
    for (size_t i = 0; i < values.size(); ++i) values[i] = stored[row_order[i]];
  }
  Consumed(*tensor);
  return Upload(values);
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

std::vector<float> DecodeVector(const StoredTensor& tensor) {
  const int64_t blocks = static_cast<int64_t>(tensor.bytes) / tensor.format->block_bytes;
  std::vector<float> values(static_cast<size_t>(blocks * tensor.format->block));
  tensor.format->decode(tensor.data, blocks, values.data());
  return values;
}

std::vector<float> DecodeMatrix(const MatrixSource& source, const ParallelFor& parallel_for) {
  std::vector<float> values(static_cast<size_t>(source.n * source.k));
  parallel_for(source.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      DecodeSourceRow(source, source.SourceRow(row), values.data() + row * source.k);
    }
  });
  return values;
}

}  // namespace treadle
