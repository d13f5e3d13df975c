// The sizes of launches of the few-rows kernel. The kernel: low_bit_few_kernel.h.
#pragma once

#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/cuda/segment.h"

namespace treadle::cuda {

inline constexpr int kFewThreads = 256;
inline constexpr int kFewWarps = kFewThreads / simt::kWarp;
inline constexpr int kTileRows = 8;  // of a matrix instruction
inline constexpr int kFewTiles = 4;  // of a block, if there are more rows than one tile's
inline constexpr int kMaxFewSegments = 8;
inline constexpr int kTableBytes = 256 * simt::kWarp * 4;
// The stride of a row's 16 sums in shared memory: rows 2t lie in other banks.
inline constexpr int kSumStride = 20;

// Blocks that shall run on a multiprocessor at the same time, by their registers: three where they
// do with 80 each, so that more bytes are on their way and bands are dealt out evenly. Where shared
// memory is short there are fewer; a launch asks the device.
constexpr int FewResident(int bits, bool second, bool one_tile) {
  return bits == 4 && !second && one_tile ? 3 : 2;
}

// Its tiles are bands.
struct FewRowsSegment : Segment {
  LowBitView w;
};

struct FewRowsParams {
  const uint16_t* x = nullptr;  // [rows, stride] in the kernel's type
  int64_t stride = 0;
  int32_t rows = 0;
  int32_t bands = 0;  // of all segments
  int32_t num_segments = 0;
  FewRowsSegment segments[kMaxFewSegments];
};
static_assert(sizeof(FewRowsParams) <= 4096);

// The kernel for a matrix's layout, and for one tile of rows or kFewTiles. In files of their own,
// one for each type of activations.
using FewRowsFunction = void (*)(FewRowsParams);
namespace low_bit {
template <bool kBf16>
FewRowsFunction FindFewRows(const LowBitView& w, bool one_tile);
}

}  // namespace treadle::cuda
