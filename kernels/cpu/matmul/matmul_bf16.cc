// Products of bf16 factors as AMX sums them (ComputeMode::kBf16), without AMX.
#include "kernels/cpu/bf16_chains.h"
#include "kernels/cpu/matmul/matmul_lanes.h"

namespace treadle::TREADLE_ISA {
namespace {

constexpr int64_t kTileValues = 256;  // k, of a group
static_assert(kBlockValues == kChainTerms);

// Values [from, from + count) of a group, rounded; behind them zeros, up to a whole block.
void RoundedTile(const PackedView& weight, int64_t group, int64_t from, int64_t count,
                 float* tile) {
  const float* w = DecodeTile(weight, group, from, count, tile);
  RoundToBf16(w, count * kLanes, tile);
  for (; count % kBlockValues != 0; ++count) Store(tile + count * kLanes, Zero());
}

// Adds `blocks` blocks of R rows to their sums.
template <int R>
TREADLE_LOOP void AddRows(const float* x, int64_t stride, int64_t blocks, const float* w,
                          float* scratch) {
  const ScopedFlush flush;
  Vec sums[R][1];
  BeginSums<R, 1>(false, scratch, sums);
  for (int64_t block = 0; block < blocks; ++block, x += kBlockValues) {
    Vec even[R], odd[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) even[r] = odd[r] = Zero();
    for (int64_t k = 0; k < kBlockValues; k += 2, w += 2 * kLanes) {
      const Vec first = Load(w), second = Load(w + kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        even[r] = Fma(first, Broadcast(x[r * stride + k]), even[r]);
        odd[r] = Fma(second, Broadcast(x[r * stride + k + 1]), odd[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][0] = Add(sums[r][0], Add(even[r], odd[r]));
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) Store(scratch + r * kLanes, sums[r][0]);
}

}  // namespace

void RoundRowToBf16(const float* x, int64_t k, float* out) {
  RoundToBf16(x, k, out);
  for (; k % kBlockValues != 0; ++k) out[k] = 0;
}

void MatMulBf16(const MatMulInput& input, const MatMulShare& share, const MatMulScratch& scratch) {
  constexpr int kRows = kWideRegisters ? 8 : 2;
  float* const tile = reinterpret_cast<float*>(scratch.tile);
  for (int64_t group = share.group_begin; group < share.group_end; ++group) {
    for (int64_t i = 0; i < input.rows; ++i) Store(scratch.sums + i * kLanes, Zero());
    for (int64_t from = 0; from < input.k; from += kTileValues) {
      const int64_t left = input.k - from;
      const int64_t count = left < kTileValues ? left : kTileValues;
      RoundedTile(share.weight, group, from, count, tile);
      ForRows<kRows>(input.rows, [&]<int R>(int64_t row) {
        AddRows<R>(input.x + row * input.x_stride + from, input.x_stride,
                   (count + kBlockValues - 1) / kBlockValues, tile, scratch.sums + row * kLanes);
      });
    }
    for (int64_t row = 0; row < input.rows; ++row) {
      const Vec sums[1][1] = {{Load(scratch.sums + row * kLanes)}};
      EndSums<1, 1>(true, share, row, group, nullptr, sums);
    }
  }
}

}  // namespace treadle::TREADLE_ISA
