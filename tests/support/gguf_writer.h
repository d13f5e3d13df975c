// Writes GGUF version 3 files for tests, with plain encoders of a few formats.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/weight_format.h"

namespace treadle {

// `values` in blocks of "f32", "f16", "bf16", "q8_0" or "q4_1"; Unimplemented for other formats.
absl::StatusOr<std::string> EncodeWeights(std::string_view format, std::span<const float> values);

class GgufWriter {
 public:
  void AddString(std::string_view key, std::string_view value);
  void AddU32(std::string_view key, uint32_t value);
  void AddF32(std::string_view key, float value);
  void AddBool(std::string_view key, bool value);
  void AddRaw(std::string_view pair);  // a key, type and value as bytes
  void AddStrings(std::string_view key, const std::vector<std::string>& values);
  void AddF32s(std::string_view key, const std::vector<float>& values);
  void AddI32s(std::string_view key, const std::vector<int32_t>& values);
  // shape: outermost first. `data` as EncodeWeights gives it.
  void AddTensor(std::string_view name, const std::vector<int64_t>& shape, uint32_t gguf_type,
                 const std::string& data);

  std::string Bytes() const;

 private:
  uint64_t metadata_count_ = 0;
  uint64_t tensor_count_ = 0;
  std::string metadata_;
  std::string infos_;
  std::string data_;
};

}  // namespace treadle
