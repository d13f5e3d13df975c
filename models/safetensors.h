// The tensor table of a .safetensors file: u64 header length, JSON header, data. Every dtype, shape
// and offset is checked against the file.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "models/checkpoint.h"
#include "models/mapped_file.h"

namespace treadle {

// The tensors point into `file`.
absl::StatusOr<std::vector<StoredTensor>> ReadSafetensors(const MappedFile& file);

}  // namespace treadle
