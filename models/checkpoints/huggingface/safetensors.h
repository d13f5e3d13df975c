// The tensor table of a .safetensors file: u64 header length, JSON header, data. Every dtype, shape
// and offset is checked against the file.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"

namespace treadle {

// One entry, as the file has it: what it means, alone or with others, is told by hf_quantization.h.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;                // "F32", "U8", "F8_E4M3"
  std::vector<int64_t> shape;       // outermost first; empty: one number
  std::span<const std::byte> data;  // as many bytes as dtype and shape ask for
  std::string file;                 // for messages

  int64_t Elements() const;
};

// The entries' data points into `file`.
absl::StatusOr<std::vector<SafetensorsEntry>> ReadSafetensors(const MappedFile& file);

// Bytes of one element; 0 for a dtype that we do not know.
int64_t SafetensorsDtypeBytes(std::string_view dtype);

}  // namespace treadle
