// From a checkpoint's tensors to weights on a backend: checks shapes, converts matrices to other
// formats if asked, packs them, converts vectors to float, drops the file's pages behind it, and
// reports progress. One tensor at a time: beside what is loaded already, there are never more than
// a matrix' floats and what they are converted to. Matrices are converted whole and then cut, so
// that a model has the same weights on any number of ranks.
//
// Thread safety: confined to the loading thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/checkpoints/checkpoint.h"
#include "models/linear.h"
#include "models/model.h"

namespace treadle {

class WeightLoader {
 public:
  // Checkpoint, backend and options outlive the loader.
  WeightLoader(const Checkpoint& checkpoint, Backend& backend, const LoadOptions& options);

  // Tensors NAME.weight [n, k] ([k, n] if `transposed` and its format is dense: quantized matrices
  // are always [n, k]) and, with `bias`, NAME.bias [n]. If set, row i of the layer is row
  // row_order[i] of the file's, and row folder_order[i] of a folder's, in whose order rows are
  // converted: blocks may straddle them.
  struct LinearSpec {
    std::string name;
    int64_t n = 0;
    int64_t k = 0;
    bool bias = false;
    std::span<const int32_t> row_order = {};
    std::span<const int32_t> folder_order = {};
    bool transposed = false;
    // This rank's part (tensor parallelism); empty: all. Rows are those of the layer, one
    // range after the other. In a layer that is cut by columns, rank 0 has the bias.
    std::vector<ShardRange> rows = {};
    std::vector<ShardRange> columns = {};
    // Nothing is multiplied with it: rows are looked up, as they are stored where the backend can.
    bool lookup_only = false;
  };
  absl::StatusOr<Linear> LoadLinear(const LinearSpec& spec);
  // The same, as a layer for each range of spec.rows.
  absl::StatusOr<std::vector<Linear>> LoadLinears(const LinearSpec& spec);

  // The one value of a vector.
  absl::StatusOr<float> LoadNumber(const std::string& name);
  // [n] f32 on the device: (value + more) * scale; of a part, if it is not empty.
  absl::StatusOr<Buffer> LoadVector(const std::string& name, int64_t n, float more = 0,
                                    float scale = 1, ShardRange part = {});
  absl::StatusOr<Buffer> Upload(std::span<const float> values);

  uint64_t weight_bytes() const { return weight_bytes_; }
  int32_t linears() const { return linears_; }  // that were loaded; each has its number as index
  void Finish() const;                          // progress 1

 private:
  using PackedMatrices = std::vector<std::unique_ptr<PackedMatrix>>;
  // A matrix of all of spec.rows, or one of each range, if `apart`.
  absl::StatusOr<PackedMatrices> Pack(const StoredTensor& tensor, const LinearSpec& spec,
                                      bool apart);
  absl::StatusOr<PackedMatrices> PackParts(const MatrixSource& whole, const LinearSpec& spec,
                                           bool apart);
  // This rank's part of a layer's matrix.
  absl::StatusOr<std::unique_ptr<PackedMatrix>> PackPart(MatrixSource whole,
                                                         const LinearSpec& spec);
  absl::StatusOr<std::vector<Linear>> Load(const LinearSpec& spec, bool apart);
  absl::StatusOr<Buffer> LoadBias(const std::string& name, const LinearSpec& spec);
  void Consumed(const StoredTensor& tensor);

  const Checkpoint& checkpoint_;
  Backend& backend_;
  const LoadOptions& options_;
  uint64_t total_ = 0;     // bytes of all tensors
  uint64_t consumed_ = 0;  // bytes of those loaded
  uint64_t weight_bytes_ = 0;
  int32_t linears_ = 0;
};

}  // namespace treadle
