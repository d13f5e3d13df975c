#include "models/checkpoints/write/gguf_file_writer.h"

#include <utility>

#include "base/status.h"
#include "models/checkpoints/gguf/gguf_file.h"

namespace treadle {
namespace {

constexpr uint32_t kVersion = 3;

template <typename T>
void Put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutString(std::string& out, std::string_view text) {
  Put<uint64_t>(out, text.size());
  out.append(text);
}

// What comes before a value, and before the elements of an array.
void PutHead(std::string& out, std::string_view key, GgufType type) {
  PutString(out, key);
  Put(out, static_cast<uint32_t>(type));
}
void PutHead(std::string& out, std::string_view key, GgufType type, size_t count) {
  PutHead(out, key, GgufType::kArray);
  Put(out, static_cast<uint32_t>(type));
  Put<uint64_t>(out, count);
}

}  // namespace

void GgufMetadataWriter::AddRaw(std::span<const std::byte> pair) {
  ++count_;
  bytes_.append(reinterpret_cast<const char*>(pair.data()), pair.size());
}

void GgufMetadataWriter::AddString(std::string_view key, std::string_view value) {
  ++count_;
  PutHead(bytes_, key, GgufType::kString);
  PutString(bytes_, value);
}

void GgufMetadataWriter::AddU32(std::string_view key, uint32_t value) {
  ++count_;
  PutHead(bytes_, key, GgufType::kU32);
  Put(bytes_, value);
}

void GgufMetadataWriter::AddF32(std::string_view key, float value) {
  ++count_;
  PutHead(bytes_, key, GgufType::kF32);
  Put(bytes_, value);
}

void GgufMetadataWriter::AddBool(std::string_view key, bool value) {
  ++count_;
  PutHead(bytes_, key, GgufType::kBool);
  Put<uint8_t>(bytes_, value ? 1 : 0);
}

void GgufMetadataWriter::AddStrings(std::string_view key, std::span<const std::string> values) {
  ++count_;
  PutHead(bytes_, key, GgufType::kString, values.size());
  for (const std::string& value : values) PutString(bytes_, value);
}

void GgufMetadataWriter::AddI32s(std::string_view key, std::span<const int32_t> values) {
  ++count_;
  PutHead(bytes_, key, GgufType::kI32, values.size());
  for (const int32_t value : values) Put(bytes_, value);
}

void GgufMetadataWriter::AddF32s(std::string_view key, std::span<const float> values) {
  ++count_;
  PutHead(bytes_, key, GgufType::kF32, values.size());
  for (const float value : values) Put(bytes_, value);
}

absl::StatusOr<std::unique_ptr<GgufFileWriter>> GgufFileWriter::Create(
    const std::string& path, const GgufMetadataWriter& metadata, const std::vector<Tensor>& tensors,
    uint64_t alignment) {
  std::unique_ptr<GgufFileWriter> writer(new GgufFileWriter());
  writer->alignment_ = alignment;
  std::string& head = writer->head_;
  head = "GGUF";
  Put(head, kVersion);
  Put<uint64_t>(head, tensors.size());
  Put(head, metadata.count());
  head += metadata.bytes();
  uint64_t offset = 0;
  for (const Tensor& tensor : tensors) {
    PutString(head, tensor.name);
    Put<uint32_t>(head, static_cast<uint32_t>(tensor.shape.size()));
    int64_t elements = 1;
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent) {
      Put(head, *extent);
      elements *= *extent;
    }
    Put(head, static_cast<uint32_t>(tensor.format->gguf_type));
    Put(head, offset);
    writer->sizes_.push_back(static_cast<uint64_t>(tensor.format->MatrixBytes(1, elements)));
    offset += (writer->sizes_.back() + alignment - 1) / alignment * alignment;
  }
  TREADLE_ASSIGN_OR_RETURN(writer->file_, OutputFile::Create(path));
  TREADLE_RETURN_IF_ERROR(writer->file_->Append(head));
  TREADLE_RETURN_IF_ERROR(writer->file_->PadTo(alignment));
  return writer;
}

absl::Status GgufFileWriter::Add(std::span<const std::byte> data) {
  TREADLE_CHECK(added_ < sizes_.size() && data.size() == sizes_[added_]);
  ++added_;
  TREADLE_RETURN_IF_ERROR(file_->Append(data));
  return file_->PadTo(alignment_);
}

absl::Status GgufFileWriter::Replace(std::string_view placeholder, std::string_view text) {
  const size_t at = head_.find(placeholder);
  TREADLE_CHECK(at != std::string::npos && text.size() == placeholder.size());
  return file_->Overwrite(at, text);
}

absl::Status GgufFileWriter::Finish() {
  TREADLE_CHECK(added_ == sizes_.size());
  return file_->Finish();
}

}  // namespace treadle
