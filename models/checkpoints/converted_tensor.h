// One tensor on its way from a checkpoint into a file, and what is written: a GGUF file, or a
// Hugging Face folder.
//
// Thread safety: pure functions, but for outputs, which are confined to one thread; ConvertTensor
// splits its work with the ParallelFor it is given.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/formats/quantize.h"
#include "models/checkpoints/checkpoint.h"

namespace treadle {

struct QuantizeOptions;  // write/quantize_checkpoint.h

struct TensorTarget {
  std::string name;                  // in the output; empty: it has no need of this tensor
  const QuantizeSpec* to = nullptr;  // null: as stored
  std::vector<int32_t> row_order;    // if set: row i is row row_order[i] of the source
  bool to_keep = false;              // `to` only stands in for a format that the output lacks
  bool transposed = false;  // folders keep this matrix, if it is dense, [in, out]; else [out, in]
  bool to_gguf = false;     // which keeps every matrix [out, in]
  float more = 0;           // added to every value
  std::vector<int32_t> column_order = {};  // if set: column i is column column_order[i]
  bool to_rates = false;                   // every value x becomes -exp(x)
  std::vector<float> importance = {};      // of columns, for Quantize
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

// A matrix' canonical values, in the order of the packed matrix. [n, k]
std::vector<float> DecodeMatrix(const MatrixSource& source, const ParallelFor& parallel_for);

// A matrix, or a vector to a dense format. Errors name the tensor. `error`: worked out if not null
// (and only if the tensor changes format).
absl::StatusOr<ConvertedTensor> ConvertTensor(const StoredTensor& tensor,
                                              const TensorTarget& target,
                                              const ParallelFor& parallel_for,
                                              ConversionError* error);

// An output's facts about itself: "treadle.source_sha256" and so on.
using Provenance = std::map<std::string, std::string>;

// Where `treadle quantize` writes. Nothing is there under its name before Finish.
class CheckpointOutput {
 public:
  virtual ~CheckpointOutput() = default;

  // The form that a tensor gets here. Errors: this output cannot hold it.
  virtual absl::StatusOr<TensorTarget> Target(const StoredTensor& tensor) const = 0;
  // Every tensor of the checkpoint, in its order.
  virtual absl::Status Add(const ConvertedTensor& tensor) = 0;
  // Bytes of tensors with their constants.
  virtual absl::StatusOr<uint64_t> Finish(const Provenance& provenance) = 0;
  // Lines for the user.
  virtual std::vector<std::string> Notices() const { return {}; }
};

// Both write to `path` as `options` say, which outlive it, as the source does.
//
// From either kind. A GGUF file's metadata is copied as it is, but for the keys of the file's type.
// A value of `provenance` that is still unknown stands there as long as it will be.
absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateGgufOutput(const Checkpoint& source,
                                                                   const std::string& path,
                                                                   const QuantizeOptions& options,
                                                                   const Provenance& provenance);
// From either kind; of GGUF, architectures whose folders keep no matrix transposed. Other files of
// a folder are copied.
absl::StatusOr<std::unique_ptr<CheckpointOutput>> CreateHuggingFaceOutput(
    const Checkpoint& source, const std::string& path, const QuantizeOptions& options);

}  // namespace treadle
