#include <algorithm>
#include <utility>

#include "kernels/status.h"
#include "models/checkpoint_output.h"
#include "models/gguf.h"
#include "models/gguf_file_writer.h"

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
constexpr FileType kFileTypes[] = {{"f32", 0},  {"f16", 1},  {"q4_0", 2}, {"q4_1", 3},
                                   {"q8_0", 7}, {"q5_0", 8}, {"q5_1", 9}, {"bf16", 32}};

constexpr const char* kMade = "f32, f16, bf16, q8_0, q4_0, q4_1";

class GgufOutput : public CheckpointOutput {
 public:
  GgufOutput(const Checkpoint& source, const OutputOptions& options)
      : source_(source), options_(options) {}

  absl::Status Create(const Provenance& provenance);
  absl::StatusOr<TensorTarget> Target(const StoredTensor& tensor) const override;
  absl::Status Add(const ConvertedTensor& tensor) override {
    bytes_ += tensor.data.size();
    return writer_->Add(tensor.data);
  }
  absl::StatusOr<uint64_t> Finish(const Provenance& provenance) override;

 private:
  uint32_t TypeOfFile(const std::vector<GgufFileWriter::Tensor>& tensors, uint32_t otherwise) const;

  const Checkpoint& source_;
  const OutputOptions options_;
  std::unique_ptr<GgufFileWriter> writer_;
  std::string placeholder_;
  uint64_t bytes_ = 0;
};

absl::StatusOr<TensorTarget> GgufOutput::Target(const StoredTensor& tensor) const {
  TensorTarget target;
  target.name = tensor.name;
  if (tensor.shape.size() != 2) return target;
  target.to = options_.weights.For(tensor.name, source_.config().tied_head);
  if (target.to != nullptr && target.to->format->gguf_type < 0) {
    return InvalidArgument(options_.path, ": GGUF has no ", target.to->name, ", expected one of ",
                           kMade, ", or a folder to write to");
  }
  return target;
}

uint32_t GgufOutput::TypeOfFile(const std::vector<GgufFileWriter::Tensor>& tensors,
                                uint32_t otherwise) const {
  std::map<std::string_view, int64_t> weights;  // of each format, in layers' matrices
  for (const GgufFileWriter::Tensor& tensor : tensors) {
    if (tensor.shape.size() != 2 || RoleOf(tensor.name) != MatrixRole::kLayer) continue;
    weights[tensor.format->name] += tensor.shape[0] * tensor.shape[1];
  }
  const auto most =
      std::ranges::max_element(weights, {}, [](const auto& use) { return use.second; });
  if (most == weights.end()) return otherwise;
  const auto* row = std::ranges::find(kFileTypes, most->first, &FileType::format);
  return row == std::end(kFileTypes) ? otherwise : row->id;
}

absl::Status GgufOutput::Create(const Provenance& provenance) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> file, GgufFile::Read(source_.path()));
  std::vector<GgufFileWriter::Tensor> tensors;
  for (const StoredTensor& tensor : source_.tensors()) {
    TREADLE_ASSIGN_OR_RETURN(const TensorTarget target, Target(tensor));
    const WeightFormat* format = target.to == nullptr ? tensor.format : target.to->format;
    tensors.push_back({tensor.name, tensor.shape, format});
  }
  GgufMetadataWriter metadata;
  for (const GgufFile::RawPair& pair : file->raw_metadata()) {
    if (pair.key == kFileType || pair.key == kQuantizationVersion ||
        pair.key.starts_with("treadle.")) {
      continue;
    }
    metadata.AddRaw(pair.bytes);
  }
  TREADLE_ASSIGN_OR_RETURN(const int64_t old_type, file->Integer(kFileType, 0));
  metadata.AddU32(kFileType, TypeOfFile(tensors, static_cast<uint32_t>(old_type)));
  metadata.AddU32(kQuantizationVersion, 2);
  for (const auto& [key, value] : provenance) metadata.AddString(key, value);
  // The sum of the source is known only at the end.
  placeholder_ = std::string(64, '?');
  metadata.AddString(kHashKey, placeholder_);
  TREADLE_ASSIGN_OR_RETURN(writer_,
                           GgufFileWriter::Create(options_.path, metadata, tensors,
                                                  static_cast<uint64_t>(file->alignment())));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> GgufOutput::Finish(const Provenance& provenance) {
  TREADLE_RETURN_IF_ERROR(writer_->Replace(placeholder_, provenance.at(std::string(kHashKey))));
  TREADLE_RETURN_IF_ERROR(writer_->Finish());
  return bytes_;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateGgufOutput(const Checkpoint& source,
                                                                   const OutputOptions& options,
                                                                   const Provenance& provenance) {
  if (source.kind() != Checkpoint::Kind::kGguf) {
    return Unimplemented(options.path, ": a .gguf file is made of a .gguf file, expected a folder ",
                         "to write to");
  }
  auto output = std::make_unique<GgufOutput>(source, options);
  TREADLE_RETURN_IF_ERROR(output->Create(provenance));
  return output;
}

}  // namespace treadle
