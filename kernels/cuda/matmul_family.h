// Matrix products: one family per layout of weights, each in files of its own.
//
//   dense/         float weights, as f32, f16 or bf16: cuBLASLt for many rows, an own kernel that
//                  reads each weight once for few
//   low_bit/       4- and 8-bit codes with scales (and minima, zeros, codebooks)
//   row_int8/      LLM.int8()
//   matmul.{h,cc}  chooses the family, converts activations once per call if they are f32
//
// A product of `rows` rows is bound by bytes up to some number of rows (few) and by arithmetic
// above it; each family knows its crossover. Within one family a row's sums run in one fixed order
// of k that does not depend on the number of rows, unless the library does not promise it; with
// `deterministic` that holds for every family (docs/design.md, Numerics).
//
// Thread safety: Pack from any one thread before the first product; the rest on the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/segment.h"

namespace treadle::cuda {

class MatMulFamily;

// Base of every packed matrix of this backend.
class CudaMatrix : public PackedMatrix {
 public:
  CudaMatrix(MatMulFamily& family, const WeightFormat& format, int64_t n, int64_t k)
      : family_(family), format_(format), n_(n), k_(k) {}
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  const WeightFormat& format() const override { return format_; }
  MatMulFamily& family() const { return family_; }

 private:
  MatMulFamily& family_;
  const WeightFormat& format_;
  const int64_t n_;
  const int64_t k_;
};

// Activations of one product: as they came, and rounded once to 16 bits.
struct MatMulInput {
  Tensor x;  // [rows, k] f32; or in `dtype`, for matrices of which all are Rounds
  // [rows, stride16] in `dtype`, 16-byte aligned rows; columns from k to the next multiple of 64
  // are 0. Null if no matrix is Rounds.
  const uint16_t* x16 = nullptr;
  int64_t stride16 = 0;
  DType dtype = DType::kBF16;  // kBF16, kF16; kF32: x16 is null
  // [rows], on the device; below zero: the row is padding and may hold anything. Null: none is.
  const int32_t* owners = nullptr;
};

class MatMulFamily {
 public:
  virtual ~MatMulFamily() = default;

  // Whether this family stores the source's format.
  virtual bool Takes(const MatrixSource& source) const = 0;
  // Repacks on the host, in parallel, and uploads.
  virtual absl::StatusOr<std::unique_ptr<CudaMatrix>> Pack(const MatrixSource& source) = 0;
  // Allocates scratch for products of up to this size; called before anything is captured, perhaps
  // again with larger numbers, never with smaller ones.
  virtual absl::Status Reserve(int64_t max_rows, int64_t max_k, int64_t max_n) = 0;
  // Whether products with this matrix read MatMulInput::x16, and not x.
  virtual bool Rounds(const CudaMatrix& matrix) const = 0;
  // projections: weights of this family only, all with k = x.cols.
  virtual void Multiply(const MatMulInput& input, std::span<const Projection> projections) = 0;
  // Backend::Embed.
  virtual void Embed(const CudaMatrix& table, const EmbedRows& rows) = 0;
};

// Brings matrices to the device piece by piece, through page-locked memory that it keeps.
class StagedUpload {
 public:
  StagedUpload(Device& device, int threads) : device_(device), threads_(threads) {}

  // To `to`: `count` pieces of `bytes` each. pack(first, number, out) writes some of them, on
  // `threads` threads at once.
  absl::Status Copy(std::byte* to, int64_t count, int64_t bytes,
                    const std::function<void(int64_t first, int64_t number, std::byte* out)>& pack);
  // Gives the memory back.
  void End() { staging_ = Buffer(); }

 private:
  Device& device_;
  const int threads_;
  Buffer staging_;
};

// Calls body(begin, end) over pieces of [0, count), on so many threads.
void InParallel(int threads, int64_t count, const std::function<void(int64_t, int64_t)>& body);

// At least `bytes` on the device; what was there before is lost, once no kernel uses it any more.
absl::Status Grow(Device& device, size_t bytes, Buffer& buffer);

struct MatMulOptions {
  DType dtype = DType::kBF16;  // activations in products, and what float weights are stored as;
                               // kF32, kF16, kBF16
  bool deterministic = false;
  int threads = 1;  // that repack on the host
  // Products of up to so many rows are taken as few, as far as the kernels for few rows go; unset:
  // each family's own crossover. For measuring where that should be.
  std::optional<int64_t> few_rows = {};
};

std::unique_ptr<MatMulFamily> MakeDenseFamily(Device& device, const MatMulOptions& options);
std::unique_ptr<MatMulFamily> MakeLowBitFamily(Device& device, const MatMulOptions& options);
std::unique_ptr<MatMulFamily> MakeRowInt8Family(Device& device, const MatMulOptions& options);

}  // namespace treadle::cuda
