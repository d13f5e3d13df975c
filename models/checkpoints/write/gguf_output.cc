#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/gguf/gguf_file.h"
#include "models/checkpoints/write/gguf_file_writer.h"
#include "models/checkpoints/write/gguf_states.h"
#include "models/checkpoints/write/quantize_checkpoint.h"

namespace treadle {
namespace {

constexpr std::string_view kHashKey = "treadle.source_sha256";
constexpr const char* kFileType = "general.file_type";
constexpr const char* kQuantizationVersion = "general.quantization_version";

// llama.cpp's numbers for what most matrices are.
struct FileType {
  std::string_view format;
  uint32_t id;
};
constexpr FileType kFileTypes[] = {{"f32", 0},   {"f16", 1},    {"q4_0", 2},   {"q4_1", 3},
                                   {"q8_0", 7},  {"q5_0", 8},   {"q5_1", 9},   {"q3_k", 12},
                                   {"q4_k", 15}, {"q5_k", 17},  {"q6_k", 18},  {"iq4_nl", 25},
                                   {"bf16", 32}, {"mxfp4", 38}, {"iq4_xs", 30}};

constexpr int64_t kAlignment = 32;  // of a file that does not say

constexpr const char* kMade =
    "f32, f16, bf16, q8_0, q5_0, q5_1, q4_0, q4_1, q6_k, q5_k, q4_k, q3_k, iq4_nl, iq4_xs";

class GgufOutput : public CheckpointOutput {
 public:
  GgufOutput(const Checkpoint& source, const std::string& path, const QuantizeOptions& options)
      : source_(source), path_(path), options_(options) {}

  absl::Status Create(const Provenance& provenance);
  absl::StatusOr<TensorTarget> Target(const StoredTensor& tensor) const override;
  absl::Status Add(const ConvertedTensor& tensor) override;
  absl::StatusOr<uint64_t> Finish(const Provenance& provenance) override;
  std::vector<std::string> Notices() const override { return notices_; }

 private:
  bool from_file() const {  // of this kind
    return source_.kind() == Checkpoint::Kind::kGguf && !source_.weight_files().empty();
  }
  // The form of a folder's tensor in the file, --weights aside.
  absl::StatusOr<TensorTarget> FolderTarget(const StoredTensor& tensor) const;
  absl::Status Place(GgufFileWriter::Tensor tensor,
                     std::vector<GgufFileWriter::Tensor>& tensors) const;
  // Metadata but for what this program adds. Returns the alignment.
  absl::StatusOr<int64_t> CopyMetadata(GgufMetadataWriter& metadata, int64_t& file_type) const;
  uint32_t TypeOfFile(const std::vector<GgufFileWriter::Tensor>& tensors, uint32_t otherwise) const;

  const Checkpoint& source_;
  const std::string path_;
  const QuantizeOptions& options_;
  std::map<std::string_view, QuantizeSpec> dense_;   // by format
  std::vector<FrequencyFactors> frequency_factors_;  // tensors of their own, behind the others
  std::unique_ptr<GgufFileWriter> writer_;
  std::string placeholder_;
  uint64_t bytes_ = 0;
  uint64_t bytes_as_floats_ = 0;
  std::vector<std::string> notices_;
};

// Tensors that some folders hold and no model needs.
bool IsNoWeight(std::string_view name) {
  return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
         name.ends_with(".attn.masked_bias") || name.ends_with(".attention.bias") ||
         name.ends_with(".attention.masked_bias");
}

absl::StatusOr<TensorTarget> GgufOutput::FolderTarget(const StoredTensor& tensor) const {
  const ModelConfig& config = source_.config();
  const Architecture& architecture = ArchitectureOf(config);
  const TensorName name = ParseTensorName(architecture, source_.kind(), tensor.name, &config);
  TensorTarget target;
  if (IsNoWeight(tensor.name) || (config.tied_head && RoleOf(tensor.name) == MatrixRole::kHead)) {
    return target;
  }
  if (name.row == nullptr) {
    return Unimplemented(path_, ": tensor '", tensor.name,
                         "' has no place in a .gguf file; expected a folder to write to");
  }
  target.name = SpellTensorName(architecture, Checkpoint::Kind::kGguf, name);
  target.row_order = OrderBetween(FileRowOrder(*name.row, config, Checkpoint::Kind::kHuggingFace),
                                  FileRowOrder(*name.row, config, Checkpoint::Kind::kGguf));
  ArrangeState(*name.row, config, target);
  target.to_gguf = true;
  target.transposed = TransposedInFolder(config, tensor);
  const bool matrix = tensor.shape.size() == 2 && name.row->part != Part::kConvolution;
  const bool blocks = tensor.format->block > 1 && !tensor.format->apart();
  if (matrix && blocks && target.column_order.empty()) return target;  // GGUF's own
  // Vectors and convolutions are floats in every file; of what GGUF has no type for, floats,
  // exactly.
  const bool keep = matrix && !blocks && tensor.format->gguf_type >= 0;
  target.to = &dense_.at(keep ? tensor.format->name : "f32");
  target.to_keep = tensor.format != target.to->format;
  const bool counts = !name.row->bare && name.row->part != Part::kStateNorm;
  if (tensor.shape.size() == 1 && counts) target.more = architecture.hugging_face_gain;
  return target;
}

absl::StatusOr<TensorTarget> GgufOutput::Target(const StoredTensor& tensor) const {
  TensorTarget target;
  target.name = tensor.name;
  if (source_.kind() == Checkpoint::Kind::kHuggingFace) {
    TREADLE_ASSIGN_OR_RETURN(target, FolderTarget(tensor));
  }
  const TensorName name =
      ParseTensorName(ArchitectureOf(source_.config()), source_.kind(), tensor.name);
  if (name.row != nullptr && InXielu(name.row->part)) target.name.clear();  // metadata's
  const bool convolution = name.row != nullptr && name.row->part == Part::kConvolution;
  if (source_.weight_files().empty() && (tensor.shape.size() == 1 || convolution)) {
    target.to = &dense_.at("f32");
    target.to_keep = true;
  }
  if (tensor.shape.size() != 2 || target.name.empty()) return target;
  const QuantizeSpec* to = options_.weights.For(tensor, source_);
  if (to == nullptr) return target;
  if (to->format->gguf_type < 0) {
    return InvalidArgument(path_, ": GGUF has no ", to->name, ", expected one of ", kMade,
                           ", or a folder to write to");
  }
  target.to = to;
  target.to_keep = false;
  if (options_.importance == nullptr) return target;
  target.importance = options_.importance->Of(target.name);
  const bool turned = target.transposed && !tensor.format->apart();
  const int64_t columns = tensor.shape[turned ? 0 : 1];
  if (!target.importance.empty() && std::ssize(target.importance) != columns) {
    return InvalidArgument(path_, ": the importance of '", target.name, "' is of ",
                           target.importance.size(), " columns, expected ", columns);
  }
  return target;
}

absl::Status GgufOutput::Add(const ConvertedTensor& tensor) {
  if (tensor.to_keep && tensor.shape.size() == 2) bytes_as_floats_ += tensor.data.size();
  bytes_ += tensor.data.size();
  return writer_->Add(tensor.data);
}

uint32_t GgufOutput::TypeOfFile(const std::vector<GgufFileWriter::Tensor>& tensors,
                                uint32_t otherwise) const {
  std::map<std::string_view, int64_t> weights;  // of each format, in layers' matrices
  for (const GgufFileWriter::Tensor& tensor : tensors) {
    if (tensor.shape.size() < 2 || RoleOf(tensor.name) != MatrixRole::kLayer) continue;
    weights[tensor.format->name] +=
        std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
  }
  const auto most =
      std::ranges::max_element(weights, {}, [](const auto& use) { return use.second; });
  if (most == weights.end()) return otherwise;
  const auto* row = std::ranges::find(kFileTypes, most->first, &FileType::format);
  return row == std::end(kFileTypes) ? otherwise : row->id;
}

absl::StatusOr<int64_t> GgufOutput::CopyMetadata(GgufMetadataWriter& metadata,
                                                 int64_t& file_type) const {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file,
                           GgufFile::Parse(source_.weight_files()[0]));
  for (const GgufFile::RawPair& pair : file->raw_metadata()) {
    if (pair.key == kFileType || pair.key == kQuantizationVersion ||
        pair.key.starts_with("treadle.") || pair.key.starts_with("split.")) {
      continue;
    }
    metadata.AddRaw(pair.bytes);
  }
  TREADLE_ASSIGN_OR_RETURN(file_type, file->Integer(kFileType, 0));
  return file->alignment();
}

// A tensor of the file, or the next expert's part of one.
absl::Status GgufOutput::Place(GgufFileWriter::Tensor tensor,
                               std::vector<GgufFileWriter::Tensor>& tensors) const {
  const Architecture& architecture = ArchitectureOf(source_.config());
  TensorName name = ParseTensorName(architecture, Checkpoint::Kind::kGguf, tensor.name);
  if (name.row != nullptr && (name.row->part == Part::kKeyUp || name.row->part == Part::kValueUp)) {
    const int64_t heads = source_.config().heads;  // whose matrices lie one behind the other
    tensor.shape = {heads, tensor.shape[0] / heads, tensor.shape[1]};
  }
  if (name.row != nullptr) {
    tensor.shape = GgufStateShape(*name.row, source_.config(), std::move(tensor.shape));
  }
  if (name.expert.empty()) {
    tensors.push_back(std::move(tensor));
    return absl::OkStatus();
  }
  const std::string expert(std::exchange(name.expert, {})), one = tensor.name;
  tensor.name = SpellTensorName(architecture, Checkpoint::Kind::kGguf, name);
  if (tensors.empty() || tensors.back().name != tensor.name) {
    tensor.shape.insert(tensor.shape.begin(), 0);
    tensors.push_back(tensor);
  }
  GgufFileWriter::Tensor& all = tensors.back();
  if (all.format != tensor.format) {
    return InvalidArgument(path_, ": '", one, "' in ", tensor.format->name, ", expected ",
                           all.format->name, " as of the layer's other experts");
  }
  if (expert != std::to_string(all.shape[0]++)) {
    return InvalidArgument(source_.path(), ": tensor '", one, "' comes where that of expert ",
                           all.shape[0] - 1, " is expected");
  }
  return absl::OkStatus();
}

absl::Status GgufOutput::Create(const Provenance& provenance) {
  GgufMetadataWriter metadata;
  int64_t file_type = 0, alignment = kAlignment;
  for (const char* name : {"f32", "f16", "bf16"}) {
    TREADLE_ASSIGN_OR_RETURN(dense_[name], ParseQuantizeSpec(name));
  }
  if (from_file()) {
    TREADLE_ASSIGN_OR_RETURN(alignment, CopyMetadata(metadata, file_type));
  } else {
    TREADLE_RETURN_IF_ERROR(DescribeModel(source_, metadata, notices_));
    frequency_factors_ = FrequencyFactorsOf(source_.config());
  }
  std::vector<GgufFileWriter::Tensor> tensors;
  int64_t converted = 0, weighed = 0;
  for (const StoredTensor& tensor : source_.tensors()) {
    TREADLE_ASSIGN_OR_RETURN(const TensorTarget target, Target(tensor));
    if (target.name.empty()) continue;
    if (target.to != nullptr && !target.to_keep && RoleOf(tensor.name) == MatrixRole::kLayer) {
      ++converted;
      weighed += target.importance.empty() ? 0 : 1;
    }
    std::vector<int64_t> shape = tensor.shape;
    if (target.transposed && tensor.format->block == 1 && !tensor.format->apart()) {
      std::ranges::reverse(shape);
    }
    TREADLE_RETURN_IF_ERROR(Place(
        {target.name, shape, target.to == nullptr ? tensor.format : target.to->format}, tensors));
  }
  if (options_.importance != nullptr && converted > 0 && weighed == 0) {
    return InvalidArgument(path_, ": none of the matrices that change their format is among the ",
                           options_.importance->size(), " whose importance is known");
  }
  for (const FrequencyFactors& factors : frequency_factors_) {
    tensors.push_back({factors.name, {std::ssize(factors.values)}, FindWeightFormat("f32")});
  }
  metadata.Add(kFileType, TypeOfFile(tensors, static_cast<uint32_t>(file_type)));
  metadata.Add(kQuantizationVersion, uint32_t{2});
  for (const auto& [key, value] : provenance) metadata.Add(key, value);
  placeholder_ = provenance.at(std::string(kHashKey));
  TREADLE_ASSIGN_OR_RETURN(
      writer_, GgufFileWriter::Create(path_, metadata, tensors, static_cast<uint64_t>(alignment)));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> GgufOutput::Finish(const Provenance& provenance) {
  for (const FrequencyFactors& factors : frequency_factors_) {
    bytes_ += factors.values.size() * sizeof(float);
    TREADLE_RETURN_IF_ERROR(writer_->Add(std::as_bytes(std::span(factors.values))));
  }
  TREADLE_RETURN_IF_ERROR(writer_->Replace(placeholder_, provenance.at(std::string(kHashKey))));
  TREADLE_RETURN_IF_ERROR(writer_->Finish());
  if (bytes_as_floats_ > 0) {
    notices_.push_back(Str(bytes_as_floats_ / 1'000'000,
                           " MB are matrices kept in 32 bits, because GGUF has no type for what "
                           "they were in"));
  }
  return bytes_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateGgufOutput(const Checkpoint& source,
                                                                   const std::string& path,
                                                                   const QuantizeOptions& options,
                                                                   const Provenance& provenance) {
  auto output = std::make_unique<GgufOutput>(source, path, options);
  TREADLE_RETURN_IF_ERROR(output->Create(provenance));
  return output;
}

}  // namespace treadle
