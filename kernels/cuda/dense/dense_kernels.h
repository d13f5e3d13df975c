// The kernels of the dense family: float weights W [n, k], rows of activations x [rows, k].
//
// Weights lie row by row, k padded with zeros to a multiple of kDenseStep: the layout that cuBLASLt
// takes, too. No other layout is needed for 16-byte loads: the k positions of a matrix instruction
// may be any, as long as both operands agree, so lane t of four takes elements 8 t .. 8 t + 7 of 32
// for two instructions (simt.h's fragments).
//
// One order of sums in all 16-bit kernels here (N1, N2): steps of kDenseStep elements are dealt out
// to kDenseParts parts, step s to part s mod kDenseParts. A part adds its steps in ascending order,
// each as four matrix instructions; then y = ((p0 + p1) + ...) + p7, then + bias, then + out. So
// the number of rows decides which kernel is fast and never the bits.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/segment.h"
#include "kernels/dtype.h"
#include "kernels/formats/matrix_source.h"
#include "kernels/tensor.h"

namespace treadle::cuda {

inline constexpr int kDenseStep = 64;  // 128 bytes: a line
inline constexpr int kDenseParts = 8;
// A product of so many rows and fewer streams its weights; why not more: DenseTile.
inline constexpr int64_t kDenseStreamRows = 32;

inline constexpr int64_t DenseStride(int64_t k) {
  return (k + kDenseStep - 1) / kDenseStep * kDenseStep;
}

struct DenseSegment : Segment {
  const void* weights = nullptr;  // [n, DenseStride(k)]
};

// Projections of one input, in one launch.
struct DenseProduct {
  DenseSegment segments[kMaxSegments];
  int32_t num_segments = 0;
  int32_t rows = 0;
  int32_t k = 0;
  DType dtype = DType::kBF16;  // of weights and x
  // [rows, x_stride]. Of 16 bits: 16-byte aligned rows, columns from k to DenseStride(k) are 0.
  const void* x = nullptr;
  int64_t x_stride = 0;
};

// The share of a block of the streaming kernel: 16 `features` x 8 `rows`, over all of k.
//
// Bytes that cross from L2 to the multiprocessors per byte of weights: 1 + rows / (16 features), as
// every block reads all of x. L2 gives about 1.4 times what memory does, so the narrow tiles stay
// near memory's speed up to 16 rows, and lose it beyond 32: there the library takes over. Wider
// tiles read less of x, but there are fewer of them, and a product needs about one for each
// multiprocessor.
struct DenseTile {
  int features = 1;
  int rows = 1;
  int stages = 0;  // of its ring of asynchronous copies; see dense_stream.cu
  friend bool operator==(const DenseTile&, const DenseTile&) = default;
};
struct DenseLimits {
  int multiprocessors = 0;
  size_t shared_bytes = 0;  // of a block; at least 96 KB
};
// features: of all projections together. rows: at most kDenseStreamRows.
DenseTile ChooseDenseTile(int64_t features, int64_t rows, const DenseLimits& limits);
size_t DenseStreamSharedBytes(const DenseTile& tile);

// Few rows: bound by bytes, each byte of weights is read once. 16-bit types. limits: the device's,
// or smaller ones.
void LaunchDenseStream(Device& device, DenseProduct product, const DenseLimits& limits);
// Many rows, the same bits: 128 x 128 tiles. 16-bit types.
void LaunchDenseTiles(Device& device, DenseProduct product);
// f32 weights and activations, fused multiply-adds; lane l of a warp takes elements 4 l .. 4 l + 3
// of 128, whatever the rows.
void LaunchDenseF32(Device& device, DenseProduct product);

// Embed of a table [*, stride] in `dtype`.
struct EmbedProduct {
  const void* table = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kBF16;
  EmbedRows rows;
};
void LaunchDenseEmbed(Device& device, const EmbedProduct& embed);

// x [rows, cols] f32 to out [rows, stride] in `dtype` (kF16, kBF16), columns from cols on 0.
// stride: a multiple of 64. out: 16-byte aligned.
void LaunchConvert(Device& device, const Tensor& x, DType dtype, uint16_t* out, int64_t stride);

// On the host: rows [begin, begin + count) of the packed matrix, [count, DenseStride(k)], zeros
// beyond k: each value decoded canonically and rounded once to `dtype` (kF32: as it is; kF16,
// kBF16: half to even, kF16 saturating).
void PackDenseRows(const MatrixSource& source, DType dtype, int64_t begin, int64_t count,
                   std::byte* out);

}  // namespace treadle::cuda
