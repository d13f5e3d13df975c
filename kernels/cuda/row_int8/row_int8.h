// LLM.int8() (Dettmers, chapter 2): vector-wise 8-bit products whose outliers stay floats, as
// kernels/backend.h defines them. Results have the CPU backend's bits, for any number of rows.
//
// Activations are quantized once for all projections that share a threshold and a rule; one row is
// quantized by the product's own kernel. Three kinds of kernel, by the number of rows:
// row_int8_stream.cu up to kInt8StreamRows, row_int8_tiles.cu above. Nothing goes to the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/cuda/matmul_family.h"
#include "kernels/cuda/row_int8/row_int8_kernels.h"

namespace treadle::cuda {

class Int8Matrix final : public CudaMatrix {
 public:
  Int8Matrix(MatMulFamily& family, const MatrixSource& source, Buffer buffer);
  size_t bytes() const override { return buffer_.bytes(); }
  // [n / 32, units] units, then the scales [n]; see row_int8_kernels.h.
  const uint8_t* codes() const { return reinterpret_cast<const uint8_t*>(buffer_.data()); }
  const float* scales() const;
  // Int8Input::threshold_bits and of_call.
  uint32_t threshold_bits() const { return threshold_bits_; }
  bool of_call() const { return of_call_; }

 private:
  const Buffer buffer_;
  uint32_t threshold_bits_ = ~uint32_t{0};
  bool of_call_ = false;
};

class RowInt8Family final : public MatMulFamily {
 public:
  RowInt8Family(Device& device, const MatMulOptions& options)
      : device_(device), options_(options) {}

  bool Takes(const MatrixSource& source) const override;
  // Errors: a bad source, more columns than kMaxInt8Columns, no memory.
  absl::StatusOr<std::unique_ptr<CudaMatrix>> Pack(const MatrixSource& source) override;
  absl::Status Reserve(int64_t max_rows, int64_t max_k, int64_t max_n) override;
  bool Rounds(const CudaMatrix&) const override { return false; }
  void Multiply(const MatMulInput& input, std::span<const Projection> projections) override;
  void Embed(const CudaMatrix& table, const EmbedIds& ids, bool accumulate, Tensor out) override;

 private:
  // Scratch for what Reserve was told.
  absl::Status Grow();
  // x as the matrix's threshold and rule want it, and scratch, which Reserve has made.
  Int8Input InputOf(const Tensor& x, const Int8Matrix& matrix) const;
  bool Streams(int64_t rows) const;
  // All segments, which are then removed.
  void Launch(Int8Product& product);

  Device& device_;
  const MatMulOptions options_;
  int64_t max_rows_ = 0;
  int64_t max_k_ = 0;
  bool packed_ = false;  // without matrices there is no scratch
  Buffer staging_;       // page-locked; until Reserve
  Buffer codes_, row_info_, call_flags_, sums_, arrivals_;
};

// Host side: groups [first, first + count) of 32 rows of the packed matrix, count * units * 2048
// bytes. threads: how many share the work.
void PackInt8Groups(const MatrixSource& source, int64_t first, int64_t count, int threads,
                    uint8_t* out);

}  // namespace treadle::cuda
