// Float weights: f32, f16 and bf16 matrices, and any other format that no family of its own takes,
// as the floats that it decodes to.
//
// Stored in MatMulOptions::dtype, whatever the source's type: the matrix instructions want both
// operands in one type. bf16 weights under f16 lose what lies beyond f16's range (they saturate),
// f16 weights under bf16 three bits.
//
// Few rows run on an own kernel that reads each weight once (dense_stream.cu); more on cuBLASLt,
// or, with `deterministic`, on tiles with the own kernel's order of sums (dense_tiles.cu). Cost of
// `deterministic`, by estimate: decoding none, prompts twice cuBLASLt's time. f32 runs on
// dense_f32.cu, or for more rows on cuBLASLt.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/dense/cublas_lt.h"
#include "kernels/cuda/dense/dense_kernels.h"
#include "kernels/cuda/matmul_family.h"

namespace treadle::cuda {

class DenseMatrix final : public CudaMatrix {
 public:
  DenseMatrix(MatMulFamily& family, const MatrixSource& source, Buffer buffer)
      : CudaMatrix(family, *source.format, source.n, source.k), buffer_(std::move(buffer)) {}
  size_t bytes() const override { return buffer_.bytes(); }
  // [n, DenseStride(k)]
  const void* data() const { return buffer_.data(); }

 private:
  const Buffer buffer_;
};

class DenseFamily final : public MatMulFamily {
 public:
  DenseFamily(Device& device, const MatMulOptions& options) : device_(device), options_(options) {}

  bool Takes(const MatrixSource& source) const override;
  // Errors: a bad source; no memory (in terms of the matrix).
  absl::StatusOr<std::unique_ptr<CudaMatrix>> Pack(const MatrixSource& source) override;
  absl::Status Reserve(int64_t max_rows, int64_t max_k, int64_t max_n) override;
  bool Rounds(const CudaMatrix&) const override { return options_.dtype != DType::kF32; }
  void Multiply(const MatMulInput& input, std::span<const Projection> projections) override;
  void Embed(const CudaMatrix& table, const EmbedIds& ids, bool accumulate, Tensor out) override;

 private:
  bool ByLibrary(int64_t rows) const;
  // At most kMaxSegments of them.
  void MultiplyOwn(const MatMulInput& input, std::span<const Projection> projections);
  bool MultiplyByLibrary(const MatMulInput& input, const Projection& projection);

  Device& device_;
  const MatMulOptions options_;
  Buffer staging_;                     // page-locked; until Reserve
  std::unique_ptr<CublasLt> library_;  // since Reserve; null with `deterministic`
};

}  // namespace treadle::cuda
