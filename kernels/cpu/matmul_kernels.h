// The table of matrix kernels, one per instruction set, and the packed layouts they read.
//
// A packed matrix is a sequence of groups of 16 output features (the last one padded with zeros),
// each group contiguous over all of k, so that one thread streams its groups. "Dword i" of a block
// is four consecutive values of k of one feature; those of the 16 features lie side by side, as
// vector lanes.
//   kF32, kF16, kBF16   [k][16] values of their own width.
//   kQ4_0, kQ4_1        per 32 k: 4 x 16 dwords of nibbles (dword i: low nibbles k = 4i.., high
//   ones
//                       k = 16 + 4i..), f16 d[16], and for kQ4_1 f16 m[16]: 288 or 320 bytes.
//   kQ8_0               per 32 k: 8 x 16 dwords of code + 128, f16 d[16]: 544 bytes.
//   kStored             16 rows exactly as the checkpoint stores them, decoded tile by tile.
//
// Only plain pointers and numbers cross this line (simd.h says why). Thread safety: kernels are
// stateless; distinct shares may run at the same time with distinct scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/formats/weight_format.h"

namespace treadle {

inline constexpr int64_t kGroupFeatures = 16;
inline constexpr int64_t kBlockValues = 32;

enum class PackKind : uint8_t { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ8_0, kStored };

struct PackedView {
  PackKind kind;
  const uint8_t* data;
  int64_t n;
  int64_t k;
  int64_t group_bytes;         // from group to group
  const WeightFormat* format;  // for kStored
};

// One block of 32 quantized activations besides its codes. Those are q in one plane of bytes
// (kInt8), or two one after the other (kInt16): low, then high, with q = 128 * high + low.
struct ActivationBlock {
  float scale;
  float scaled_sum;  // scale * (sum of q)
  int32_t low_sum;   // of the first 16 q
  int32_t high_sum;
};

struct MatMulInput {
  const float* x;  // [rows, k]
  int64_t x_stride;
  const int8_t* codes;            // [rows, k / 32, planes, 32]; of integer kernels
  const ActivationBlock* blocks;  // [rows, k / 32]; of integer kernels
  int64_t rows;
  int64_t k;
};

// Groups [group_begin, group_end) of one projection.
struct MatMulShare {
  PackedView weight;
  int64_t group_begin;
  int64_t group_end;
  const float* bias;  // [n] or null
  float* out;         // [rows, n]
  int64_t out_stride;
  bool accumulate;
};

// One thread's memory, 64-byte aligned.
inline constexpr int64_t kTileBytes = 48 << 10;
inline constexpr int64_t kMaxGroupsAtOnce = 4;
struct MatMulScratch {
  uint8_t* tile;  // [kTileBytes]
  float* sums;    // [rows, kMaxGroupsAtOnce * 16]: sums between the tiles along k
};

// One compute mode.
struct MatMulKernel {
  void (*run)(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch);
  // Of one row, x: [k]. Null if activations stay float.
  void (*quantize)(const float* x, int64_t k, int8_t* codes, ActivationBlock* blocks);
  int planes;  // bytes per quantized activation
};

struct MatMulKernels {
  MatMulKernel exact;
  MatMulKernel int8;
  MatMulKernel int16;
};

namespace avx2 {
extern const MatMulKernels kMatMulKernels;
}
namespace avx512 {
extern const MatMulKernels kMatMulKernels;
}

}  // namespace treadle
