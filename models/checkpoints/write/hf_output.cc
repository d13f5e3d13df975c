#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/output_file.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/write/checkpoint_output.h"
#include "models/checkpoints/write/hf_folder_files.h"
#include "models/checkpoints/write/hf_matrix_writer.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

class HuggingFaceOutput : public CheckpointOutput {
 public:
  HuggingFaceOutput(const Checkpoint& source, const OutputOptions& options)
      : source_(source), options_(options) {}

  absl::Status Create();
  absl::StatusOr<TensorTarget> Target(const StoredTensor& tensor) const override;
  absl::Status Add(const ConvertedTensor& tensor) override;
  absl::StatusOr<uint64_t> Finish(const Provenance& provenance) override;
  std::vector<std::string> Notices() const override;

 private:
  bool gguf() const { return source_.kind() == Checkpoint::Kind::kGguf; }
  absl::StatusOr<TensorTarget> GgufTarget(const StoredTensor& tensor) const;

  const Checkpoint& source_;
  const OutputOptions options_;
  std::optional<QuantizeSpec> as_floats_;  // f32
  std::unique_ptr<OutputFolder> folder_;
  std::unique_ptr<SafetensorsWriter> writer_;
  HfQuantizationSummary summary_;
  float outlier_threshold_ = 6.0f;  // of the matrices written
  uint64_t bytes_as_floats_ = 0;    // of matrices that were blocks of GGUF, and nobody converts
  Json config_;
};

absl::Status HuggingFaceOutput::Create() {
  if (const Architecture& architecture = ArchitectureOf(source_.config());
      gguf() && architecture.hugging_face_transposed) {
    return Unimplemented(options_.path, ": a folder from a .gguf file of architecture ",
                         architecture.name, ", whose folders keep matrices transposed; expected ",
                         "an OUT that ends in .gguf");
  }
  TREADLE_ASSIGN_OR_RETURN(as_floats_, ParseQuantizeSpec("f32"));
  size_t room = 4096;  // metadata
  for (const StoredTensor& tensor : source_.tensors()) {
    TREADLE_ASSIGN_OR_RETURN(const TensorTarget target, Target(tensor));
    room += HfHeaderRoom(target.name);
  }
  TREADLE_ASSIGN_OR_RETURN(config_, HfConfigOf(source_));
  TREADLE_ASSIGN_OR_RETURN(folder_, OutputFolder::Create(options_.path));
  TREADLE_RETURN_IF_ERROR(WriteHfTextFiles(source_, *folder_));
  TREADLE_ASSIGN_OR_RETURN(writer_,
                           SafetensorsWriter::Create(folder_->Path("model.safetensors"), room));
  return absl::OkStatus();
}

absl::StatusOr<TensorTarget> HuggingFaceOutput::GgufTarget(const StoredTensor& tensor) const {
  TensorTarget target;
  const ModelConfig& config = source_.config();
  const Architecture& architecture = ArchitectureOf(config);
  const TensorName name = ParseTensorName(architecture, source_.kind(), tensor.name);
  if (name.row == nullptr) {
    return Unimplemented(options_.path, ": tensor '", tensor.name,
                         "' has no place in a Hugging Face folder; expected an OUT that ends in "
                         ".gguf");
  }
  target.name = SpellTensorName(architecture, Checkpoint::Kind::kHuggingFace, name);
  target.row_order = GgufRowOrder(*name.row, config);
  // Blocks of GGUF have no place there: floats, exactly.
  if (tensor.shape.size() == 2 && tensor.format->block > 1) {
    target.to = &*as_floats_;
    target.to_keep = true;
  }
  return target;
}

absl::StatusOr<TensorTarget> HuggingFaceOutput::Target(const StoredTensor& tensor) const {
  TensorTarget target;
  target.name = tensor.name;
  if (gguf()) {
    TREADLE_ASSIGN_OR_RETURN(target, GgufTarget(tensor));
  } else {
    target.transposed = TransposedInFolder(source_.config(), tensor);
  }
  if (tensor.shape.size() != 2) return target;
  if (tensor.format->name.starts_with("gptq")) {  // read, but not written
    target.to = &*as_floats_;
    target.to_keep = true;
  }
  const QuantizeSpec* to = options_.weights.For(tensor.name, source_.config().tied_head);
  if (to == nullptr) return target;
  if (!to->format->apart() && to->format->block > 1) {
    return InvalidArgument(options_.path, ": a Hugging Face folder has no ", to->name,
                           ", expected an OUT that ends in .gguf");
  }
  target.to = to;
  target.to_keep = false;
  return target;
}

absl::Status HuggingFaceOutput::Add(const ConvertedTensor& tensor) {
  if (tensor.to_keep) bytes_as_floats_ += tensor.data.size();
  if (tensor.format->activations == ActivationPolicy::kRowInt8) {
    outlier_threshold_ = tensor.constants.outlier_threshold;
  }
  if (tensor.shape.size() == 2) {
    const MatrixRole role = RoleOf(tensor.name);
    const bool linear = role == MatrixRole::kLayer || role == MatrixRole::kHead;
    summary_.Note(tensor, linear, role == MatrixRole::kEmbedding && source_.config().tied_head);
  }
  return AddHfTensor(tensor, *writer_);
}

absl::StatusOr<uint64_t> HuggingFaceOutput::Finish(const Provenance& provenance) {
  Provenance metadata = provenance;
  metadata["format"] = "pt";
  TREADLE_RETURN_IF_ERROR(writer_->Finish(metadata));
  const Json dtype = config_.value("dtype", config_.value("torch_dtype", Json("float32")));
  const Json quantization =
      summary_.Config(options_.outlier_threshold.value_or(outlier_threshold_),
                      dtype.is_string() ? dtype.get<std::string>() : "float32");
  config_.erase("quantization_config");
  if (!quantization.is_null()) config_["quantization_config"] = quantization;
  TREADLE_RETURN_IF_ERROR(folder_->Write(
      "config.json", config_.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"));
  TREADLE_RETURN_IF_ERROR(folder_->Finish());
  return writer_->data_bytes();
}

std::vector<std::string> HuggingFaceOutput::Notices() const {
  std::vector<std::string> notices;
  if (bytes_as_floats_ > 0) {
    notices.push_back(Str(bytes_as_floats_ / 1'000'000,
                          " MB are matrices kept in 32 bits, because what is written here "
                          "has neither GGUF's blocks nor GPTQ's groups: embedding=f16 halves the "
                          "embedding"));
  }
  if (!summary_.Config(0, "").is_null() && !summary_.ReadByBitsAndBytes()) {
    notices.push_back(
        "Treadle reads this folder; transformers with bitsandbytes reads nf4, fp4 or int8 alone, "
        "in linear layers only");
  }
  return notices;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateHuggingFaceOutput(
    const Checkpoint& source, const OutputOptions& options) {
  auto output = std::make_unique<HuggingFaceOutput>(source, options);
  TREADLE_RETURN_IF_ERROR(output->Create());
  return output;
}

}  // namespace treadle
