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

void PutValue(std::string& out, std::string_view text) { PutString(out, text); }
void PutValue(std::string& out, bool value) { Put<uint8_t>(out, value ? 1 : 0); }
template <typename T>
requires std::is_arithmetic_v<T>
void PutValue(std::string& out, T value) { Put(out, value); }

template <typename T>
constexpr GgufType kTypeOf = GgufType::kString;
template <>
constexpr GgufType kTypeOf<uint32_t> = GgufType::kU32;
template <>
constexpr GgufType kTypeOf<int32_t> = GgufType::kI32;
template <>
constexpr GgufType kTypeOf<float> = GgufType::kF32;
template <>
constexpr GgufType kTypeOf<bool> = GgufType::kBool;

template <typename T>
void PutTyped(std::string& out, T value) {
  Put(out, static_cast<uint32_t>(kTypeOf<T>));
  PutValue(out, value);
}
template <typename T>
void PutTyped(std::string& out, std::span<const T> values) {
  Put(out, static_cast<uint32_t>(GgufType::kArray));
  Put(out, static_cast<uint32_t>(kTypeOf<T>));
  Put<uint64_t>(out, values.size());
  for (const T& value : values) PutValue(out, value);
}

}  // namespace

void GgufMetadataWriter::AddRaw(std::span<const std::byte> pair) {
  ++count_;
  bytes_.append(reinterpret_cast<const char*>(pair.data()), pair.size());
}

void GgufMetadataWriter::Add(std::string_view key, const Value& value) {
  ++count_;
  PutString(bytes_, key);
  std::visit([&](const auto& held) { PutTyped(bytes_, held); }, value);
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
  TREADLE_CHECK(added_ < sizes_.size() && data.size() <= sizes_[added_] - part_);
  TREADLE_RETURN_IF_ERROR(file_->Append(data));
  part_ += data.size();
  if (part_ < sizes_[added_]) return absl::OkStatus();
  part_ = 0;
  ++added_;
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
