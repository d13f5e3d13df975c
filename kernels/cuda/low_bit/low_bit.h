// Low-bit matrices on a GPU: codes of 4 or 8 bits with constants per run of columns. Every
// quantized format of kernels/formats but LLM.int8() is stored so.
//
// A weight is w = scale * value[code] + offset (GGUF's blocks) or scale * (value[code] - zero)
// (formats with codebooks and zero points). Layout: features in bands of 16, columns in steps of
// 64, features and columns padded with zeros. A step of a band is four products of mma.m16n8k16
// with the weights as A; its codes lie so that each lane gets the bytes of its own fragments with
// one 16-byte load (two for 8 bits), and every lane's bytes lie in the order of its registers:
//   * column 64 step + ColumnOf(...) of x is what a lane must hold of B. The order of columns in a
//     product is free as long as weights and x agree; it is such that a lane reads 16 consecutive
//     bytes of rounded x, or 8 where scales change every 16 columns;
//   * 4 bits: word j of a lane is product j, byte r its register a[r], low nibble = low half;
//   * 8 bits: words 2j and 2j + 1 of a lane are product j; words 0 to 3 of all lanes come first.
// Constants: [band][run][8][2] x {scale} or {scale, second}: feature g of a band beside feature g
// + 8. They are f16 where every constant of the matrix is exact so, else f32; so the canonical
// value can be computed from what is stored, bit for bit. A run is `granule` columns (16, 32, or
// 64), times 2^run_shift.
//
// A matrix that does not fit (scales that change within 16 columns, codebooks beyond the range of
// 16 bits) is kept as floats [n, k] and multiplied by a plain kernel: right, but four bytes a
// weight.
//
// Products of few rows: values of codes enter rounded once to 16 bits (integers of up to 8 bits are
// exact); scales, offsets and sums are f32. Their order is the same for every number of rows, so
// with `deterministic` they are all there is. Products of many rows otherwise round whole weights
// to 16 bits and are the library's.
//
// Thread safety: values and pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/matmul_family.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/runtime/host_device.h"

namespace treadle::cuda {

inline constexpr int kBandFeatures = 16;
inline constexpr int kStepColumns = 64;
inline constexpr int kWholeRow = 30;  // run_shift of matrices with one run per row

enum class Second : int32_t { kNone, kOffset, kZero };

// A packed matrix; addresses are of the device.
struct LowBitView {
  const uint32_t* codes = nullptr;  // [bands][steps] x StepWords(bits); floats [n, k] if bits = 32
  const std::byte* constants = nullptr;
  // The few-rows kernel's table by a byte of codes, in the activations' type: the values of
  // both its nibbles, or of the code twice. [256]
  const uint32_t* pairs = nullptr;
  const float* values = nullptr;  // canonical value of each code [256]
  int32_t n = 0;
  int32_t k = 0;
  int32_t steps = 0;
  int32_t bits = 4;      // 4, 8, 32
  int32_t granule = 64;  // columns between changes of constants: 16, 32, 64
  int32_t run_shift = 0;
  int32_t runs = 0;            // per row
  int32_t half_constants = 0;  // 1: constants are f16
  Second second = Second::kNone;
};

// -- index maps -----------------------------------------------------------------------------------

// Column within a step of element i (0..3) of lane-in-group t (0..3) in product j (0..3): elements
// 0, 1 are columns 2t, 2t + 1 of the instruction, elements 2, 3 its columns 2t + 8, 2t + 9.
TREADLE_HOST_DEVICE int ColumnOf(int granule, int j, int t, int i) {
  return granule == 16 ? 16 * j + 4 * t + i : 32 * (j / 2) + 8 * t + 4 * (j % 2) + i;
}

// Where a weight's code lies, from the beginning of its band's step.
struct CodePlace {
  int32_t word;
  int32_t shift;
};
TREADLE_HOST_DEVICE CodePlace PlaceOfCode(int bits, int granule, int feature, int column) {
  const int t = granule == 16 ? column / 4 % 4 : column / 8 % 4;
  const int j = granule == 16 ? column / 16 : column / 32 * 2 + column / 4 % 2;
  const int i = column % 4;
  const int lane = feature % 8 * 4 + t;
  const int code = (feature / 8 + i / 2 * 2) * 2 + i % 2;  // 2r: low half of a[r]
  if (bits == 4) return {lane * 4 + j, code * 4};
  return {j / 2 * 128 + lane * 4 + j % 2 * 2 + code / 4, code % 4 * 8};
}
// Words of codes of one step of a band.
TREADLE_HOST_DEVICE int StepWords(int bits) { return 32 * bits; }
// Where the constants of a feature begin, in numbers; the second follows the scale.
TREADLE_HOST_DEVICE int64_t PlaceOfConstants(const LowBitView& w, int feature, int column) {
  const int run = column / w.granule >> w.run_shift;
  const int width = w.second == Second::kNone ? 1 : 2;
  const int64_t pair = (int64_t{feature / kBandFeatures} * w.runs + run) * 8 + feature % 8;
  return (pair * 2 + feature % kBandFeatures / 8) * width;
}

// Bands from feature `first` (a multiple of 16) on: a matrix of `count` features. Not of floats.
inline LowBitView SliceFeatures(LowBitView w, int64_t first, int64_t count) {
  const int64_t band = first / kBandFeatures;
  w.codes += band * w.steps * StepWords(w.bits);
  const int64_t width = (w.second == Second::kNone ? 1 : 2) * (w.half_constants != 0 ? 2 : 4);
  w.constants += band * w.runs * kBandFeatures * width;
  w.n = static_cast<int32_t>(count);
  return w;
}

// -- kernels --------------------------------------------------------------------------------------

// A Projection of this family's.
struct LowBitProduct {
  LowBitView w;
  const float* bias = nullptr;  // [n] or null
  Tensor out;                   // [rows, n]
  bool accumulate = false;
};

// Products of few rows: each code is read once per 8 or 32 rows. Weights of any layout but floats;
// the order of sums depends on the weight alone. dtype: kBF16 or kF16.
void LowBitFewRows(Device& device, const MatMulInput& input,
                   std::span<const LowBitProduct> products);
// Exact canonical weights and f32 activations; any layout.
void LowBitExact(Device& device, Tensor x, const LowBitProduct& product);
// The matrix rounded once to `dtype`: out [n, 64 * steps]. Any layout but floats.
void LowBitDecode(Device& device, const LowBitView& matrix, DType dtype, uint16_t* out);
// MatMulFamily::Embed.
void LowBitEmbed(Device& device, const LowBitView& table, const EmbedRows& rows);

// -- matrices -------------------------------------------------------------------------------------

class LowBitMatrix final : public CudaMatrix {
 public:
  LowBitMatrix(MatMulFamily& family, const WeightFormat& format, const LowBitView& view,
               Buffer memory)
      : CudaMatrix(family, format, view.n, view.k), view_(view), memory_(std::move(memory)) {}
  size_t bytes() const override { return memory_.bytes(); }
  const LowBitView& view() const { return view_; }

 private:
  const LowBitView view_;
  const Buffer memory_;
};

// Repacks with `threads` host threads. dtype: of activations; decides how values are rounded for
// products. Errors: a source that is not valid, no memory.
absl::StatusOr<std::unique_ptr<LowBitMatrix>> PackLowBit(Device& device, MatMulFamily& family,
                                                         const MatrixSource& source, DType dtype,
                                                         int threads);

}  // namespace treadle::cuda
