// The entries of a matrix in a Hugging Face folder: the inverse of hf_quantization.h, whose table
// of names holds here.
//
// Thread safety: pure functions, but for the writer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "models/checkpoints/converted_tensor.h"
#include "models/checkpoints/write/safetensors_writer.h"

namespace treadle {

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
