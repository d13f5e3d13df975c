#include "models/checkpoints/write/safetensors_writer.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "models/checkpoints/huggingface/safetensors.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, size_t header_room) {
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter());
  TREADLE_ASSIGN_OR_RETURN(writer->file_, OutputFile::Create(path));
  writer->header_room_ = (header_room + 7) / 8 * 8;
  TREADLE_RETURN_IF_ERROR(
      writer->file_->Append(std::string(sizeof(uint64_t) + writer->header_room_, ' ')));
  return writer;
}

absl::Status SafetensorsWriter::Put(const std::string& name, const std::string& dtype,
                                    const std::vector<int64_t>& shape,
                                    std::span<const std::byte> data) {
  header_[name] = {{"dtype", dtype},
                   {"shape", shape},
                   {"data_offsets", {data_bytes_, data_bytes_ + data.size()}}};
  data_bytes_ += data.size();
  return file_->Append(data);
}

absl::Status SafetensorsWriter::Add(const std::string& name, const std::string& dtype,
                                    const std::vector<int64_t>& shape,
                                    std::span<const std::byte> data) {
  if (data.size() % 8 == 0) return Put(name, dtype, shape, data);
  late_.push_back({name, dtype, shape, {data.begin(), data.end()}});
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish(const std::map<std::string, std::string>& metadata) {
  std::ranges::stable_sort(late_, std::greater(),
                           [](const Late& late) { return SafetensorsDtypeBytes(late.dtype); });
  for (const Late& late : late_) {
    TREADLE_RETURN_IF_ERROR(Put(late.name, late.dtype, late.shape, late.data));
  }
  header_["__metadata__"] = metadata;
  std::string text = header_.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  TREADLE_CHECK(text.size() <= header_room_);
  text.resize(header_room_, ' ');
  const uint64_t length = text.size();
  const std::string size(reinterpret_cast<const char*>(&length), sizeof(length));
  TREADLE_RETURN_IF_ERROR(file_->Overwrite(0, size + text));
  return file_->Finish();
}

}  // namespace treadle
