// One tensor on its way from a checkpoint into a file.
//
// Thread safety: pure functions; ConvertTensor splits its work with the ParallelFor it is given.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/quantize.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

struct TensorTarget {
  std::string name;                  // in the output; empty: it has no need of this tensor
  const QuantizeSpec* to = nullptr;  // null: as stored
  std::vector<int32_t> row_order;    // if set: row i is row row_order[i] of the source
  bool to_keep = false;              // `to` only stands in for a format that the output lacks
  bool transposed = false;  // folders keep this matrix, if it is dense, [in, out]; else [out, in]
  bool to_gguf = false;     // which keeps every matrix [out, in]
};

struct ConvertedTensor {
  std::string name;
  const WeightFormat* format = nullptr;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // into `own`, or the source's file
  MatrixConstants constants;        // apart formats
  std::optional<NestedScales> nested;
  std::string spec;      // QuantizeSpec::name; empty: as stored
  bool to_keep = false;  // as in the target
  std::vector<std::byte> own;
};

// How far a matrix is from what it was made of.
struct ConversionError {
  double mean_absolute = 0;
  double relative = 0;  // 2-norm of the difference over that of the original
  double worst = 0;
};

// A matrix, or a vector to a dense format. Errors name the tensor. `error`: worked out if not null
// (and only if the tensor changes format).
absl::StatusOr<ConvertedTensor> ConvertTensor(const StoredTensor& tensor,
                                              const TensorTarget& target,
                                              const ParallelFor& parallel_for,
                                              ConversionError* error);

}  // namespace treadle
