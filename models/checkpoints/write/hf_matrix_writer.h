// The entries of a matrix in a Hugging Face folder: the inverse of hf_quantization.h, whose table
// of names holds here; and the file that they are in.
//
// Thread safety: pure functions, but for the writer.
#pragma once

#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/output_file.h"
#include "models/checkpoints/converted_tensor.h"

namespace treadle {

// Writes a .safetensors file, tensor by tensor: only small ones are kept in memory.
//
// The format's readers want tensors without gaps between them, and each at a multiple of its
// element's size. So those whose size is no multiple of 8 come last, largest elements first; and
// the header, which is complete only then, has room left for it in front (the rest is spaces).
// Thread safety: confined to one thread.
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

// Errors: a format, or constants, that have no place there.
absl::Status AddHfTensor(const ConvertedTensor& tensor, SafetensorsWriter& writer);

// Room in the header for all entries of a tensor.
size_t HfHeaderRoom(const std::string& tensor_name);

// Collects what was written, for config.json.
class HfQuantizationSummary {
 public:
  // `linear`: transformers has it as a Linear layer. `tied`: it is the head too.
  void Note(const ConvertedTensor& tensor, bool linear, bool tied);

  // quantization_config; null: nothing is quantized.
  nlohmann::json Config(float outlier_threshold, const std::string& dtype) const;
  // Whether transformers with bitsandbytes reads it.
  bool ReadByBitsAndBytes() const;

 private:
  std::vector<std::string> formats_;  // distinct, of quantized matrices
  bool double_quantized_ = false;
  bool beyond_linear_ = false;          // an embedding is quantized
  std::vector<std::string> as_floats_;  // Linear layers that are not
};

}  // namespace treadle
