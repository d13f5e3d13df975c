// Canonical values one by one: rows for Embed, products of floats.
#include <algorithm>

#include "kernels/cuda/low_bit/low_bit.h"
#include "kernels/cuda/low_bit/low_bit_constants.h"
#include "kernels/cuda/rows/row_output.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / simt::kWarp;

// -- one value ------------------------------------------------------------------------------------

TREADLE_DEVICE float ConstantAt(const LowBitView& w, int64_t at) {
  if (w.half_constants != 0) {
    return simt::FromF16(reinterpret_cast<const uint16_t*>(w.constants)[at]);
  }
  return reinterpret_cast<const float*>(w.constants)[at];
}

TREADLE_DEVICE float ValueAt(const LowBitView& w, int feature, int column) {
  if (w.bits == 32) return simt::AsFloat(w.codes[int64_t{feature} * w.k + column]);
  const CodePlace place =
      PlaceOfCode(w.bits, w.granule, feature % kBandFeatures, column % kStepColumns);
  const int64_t step = int64_t{feature / kBandFeatures} * w.steps + column / kStepColumns;
  const uint32_t word = w.codes[step * StepWords(w.bits) + place.word];
  const uint32_t code = word >> place.shift & ((1u << w.bits) - 1);
  const int64_t at = PlaceOfConstants(w, feature, column);
  const float second = w.second == Second::kNone ? 0.0f : ConstantAt(w, at + 1);
  return CanonicalValue(w.second, w.values[code], ConstantAt(w, at), second);
}

// -- Embed: a block per row -----------------------------------------------------------------------

struct EmbedParams {
  LowBitView table;
  EmbedRows rows;
};

TREADLE_KERNEL(kThreads)
void EmbedKernel(EmbedParams p) {
  EmbedRow(p.rows, [&](int row, int column) { return ValueAt(p.table, row, column); });
}

// -- products of floats: a warp per feature and eight rows ----------------------------------------

constexpr int kExactRows = 8;

struct ExactParams {
  LowBitView w;
  const float* x = nullptr;
  int64_t stride = 0;
  int32_t rows = 0;
  Segment out;
};

// Lane l sums columns l, l + 32, ... in ascending order, then lanes are added: for every number of
// rows the same.
TREADLE_KERNEL(kThreads)
void ExactKernel(ExactParams p) {
  simt::AwaitEarlierLaunches();
  const int feature = simt::BlockX() * kWarps + simt::Warp();
  if (feature >= p.w.n) return;  // the whole warp
  for (int first = simt::BlockY() * kExactRows; first < p.rows;
       first += simt::GridY() * kExactRows) {
    float sums[kExactRows] = {};
    for (int column = simt::Lane(); column < p.w.k; column += simt::kWarp) {
      const float value = ValueAt(p.w, feature, column);
      TREADLE_UNROLL
      for (int i = 0; i < kExactRows; ++i) {
        if (first + i >= p.rows) break;
        sums[i] = simt::Fma(value, p.x[(first + i) * p.stride + column], sums[i]);
      }
    }
    TREADLE_UNROLL
    for (int i = 0; i < kExactRows; ++i) {
      const float sum = simt::WarpSum(sums[i]);
      if (first + i < p.rows && simt::Lane() == 0) StoreResult(p.out, first + i, feature, sum);
    }
  }
}

}  // namespace

void LowBitEmbed(Device& device, const LowBitView& table, const EmbedRows& rows) {
  device.Launch(EmbedKernel, {.grid_x = static_cast<uint32_t>(rows.rows), .threads = kThreads},
                EmbedParams{table, rows});
}

void LowBitExact(Device& device, Tensor x, const LowBitProduct& product) {
  const LowBitView& w = product.w;
  constexpr int64_t kMaxBlocks = 65535;
  const int64_t row_blocks = std::min((x.rows + kExactRows - 1) / kExactRows, kMaxBlocks);
  device.Launch(ExactKernel,
                {.grid_x = static_cast<uint32_t>((w.n + kWarps - 1) / kWarps),
                 .grid_y = static_cast<uint32_t>(row_blocks),
                 .threads = kThreads},
                ExactParams{.w = w,
                            .x = x.Row<float>(0),
                            .stride = x.stride,
                            .rows = static_cast<int32_t>(x.rows),
                            .out = {product.bias, product.out, product.accumulate}});
}

}  // namespace treadle::cuda
