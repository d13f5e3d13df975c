// All matrix products of one device: each matrix belongs to the first family that takes its format
// (row_int8, low_bit, dense), and a call's projections run family by family over one conversion of
// the activations, if they do not come converted.
//
// Thread safety: Pack from any one thread before the first product; the rest on the rank's thread.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/matmul_family.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

class MatMuls {
 public:
  // options.dtype: kF32, kF16 or kBF16. The device must live longer.
  static absl::StatusOr<std::unique_ptr<MatMuls>> Create(Device& device,
                                                         const MatMulOptions& options);

  // Errors: a bad source; a format that no family takes; no memory.
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source);

  // Backend::InputType.
  DType InputType(std::span<const PackedMatrix* const> weights) const;

  // Allocates scratch for products of up to max_rows rows and max_k inputs, max_n outputs. Before
  // anything is captured; perhaps again with larger numbers.
  absl::Status Reserve(int64_t max_rows, int64_t max_k, int64_t max_n);
  // Whether that has been done for at least this size.
  bool Holds(int64_t rows, int64_t k, int64_t n) const {
    return rows <= max_rows_ && k <= max_k_ && n <= max_n_;
  }

  // Backend::MatMul. owners: see MatMulInput. Beyond the reserved size it allocates (not while
  // capturing). Errors: no memory for that.
  absl::Status Multiply(Tensor x, std::span<const Projection> projections,
                        const int32_t* owners = nullptr);

  // Backend::Embed.
  void Embed(const PackedMatrix& table, const EmbedRows& rows);

 private:
  MatMuls(Device& device, const MatMulOptions& options);

  // Launches a conversion if some product needs one.
  MatMulInput InputOf(const Tensor& x, std::span<const Projection> projections);

  Device& device_;
  const MatMulOptions options_;
  // In the order in which they are asked.
  std::vector<std::unique_ptr<MatMulFamily>> families_;
  int64_t max_k_ = 0;
  int64_t max_n_ = 0;
  int64_t max_rows_ = 0;
  Buffer x16_;                     // [max_rows, max_k rounded up to 64]
  std::vector<Projection> group_;  // of one family, during Multiply
};

}  // namespace treadle::cuda
