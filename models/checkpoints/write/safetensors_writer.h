// Writes a .safetensors file, tensor by tensor: only small ones are kept in memory.
//
// The format's readers want tensors without gaps between them, and each at a multiple of its
// element's size. So those whose size is no multiple of 8 come last, largest elements first; and
// the header, which is complete only then, has room left for it in front (the rest is spaces).
//
// Thread safety: confined to one thread.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/output_file.h"

namespace treadle {

class SafetensorsWriter {
 public:
  // header_room: bytes for the header; HeaderRoom of each tensor, and metadata.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(const std::string& path,
                                                                   size_t header_room);
  static size_t HeaderRoom(const std::string& tensor_name) { return tensor_name.size() + 160; }

  // shape: outermost first.
  absl::Status Add(const std::string& name, const std::string& dtype,
                   const std::vector<int64_t>& shape, std::span<const std::byte> data);
  // `metadata` is for whoever reads the file; ends it.
  absl::Status Finish(const std::map<std::string, std::string>& metadata);

  uint64_t data_bytes() const { return data_bytes_; }

 private:
  struct Late {
    std::string name;
    std::string dtype;
    std::vector<int64_t> shape;
    std::vector<std::byte> data;
  };
  SafetensorsWriter() = default;
  absl::Status Put(const std::string& name, const std::string& dtype,
                   const std::vector<int64_t>& shape, std::span<const std::byte> data);

  std::unique_ptr<OutputFile> file_;
  size_t header_room_ = 0;
  nlohmann::json header_ = nlohmann::json::object();
  std::vector<Late> late_;
  uint64_t data_bytes_ = 0;
};

}  // namespace treadle
