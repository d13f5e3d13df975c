// AddLowRank, as two launches for up to kMaxRows rows of any products: x A, then what it makes with
// B. Rows and factors are named in the launches' parameters, so nothing is uploaded for them.
// Contract: kernels/backend.h.
#include <algorithm>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

constexpr int kTileRows = 8;  // of a product, which share loads of its factors
constexpr int kPanel = static_cast<int>(kLowRankPanel);
constexpr int kChains = 8;  // of a sum over k
constexpr int kThreads = kPanel * kChains;
static_assert(kTileRows == kChains);  // a chain's thread adds up the chains of a row

constexpr int kMaxProducts = 16;
constexpr int kMaxRows = 768;

struct Factors {
  const void* a = nullptr;  // null: x is x A already
  const void* b = nullptr;
  float* out = nullptr;
  int64_t out_stride = 0;
  int32_t rank = 0;
  int32_t n = 0;
  int32_t first_row = 0;  // of LowRankParams::rows
  int32_t rows = 0;
  int32_t first_tile = 0;
  DType type = DType::kF32;
};

struct LowRankParams {
  const void* x = nullptr;  // [*, k]
  int64_t x_stride = 0;
  float* inner = nullptr;  // x A of the launch's rows, [kMaxRows, width]
  int32_t width = 0;       // whole panels of the largest rank
  int32_t k = 0;
  int32_t products = 0;
  DType x_type = DType::kF32;
  Factors each[kMaxProducts];
  int32_t rows[kMaxRows];  // of x and of out
};

TREADLE_DEVICE float Load(DType type, const void* from, int64_t at) {
  if (type == DType::kF32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return type == DType::kF16 ? simt::FromF16(bits) : simt::FromBf16(bits);
}

// Some rows of a product.
struct Tile {
  int product;
  int first;  // of LowRankParams::rows
  int rows;
};
TREADLE_DEVICE Tile TileOf(const LowRankParams& p, int tile) {
  int product = 0;
  while (product + 1 < p.products && tile >= p.each[product + 1].first_tile) ++product;
  const Factors& f = p.each[product];
  const int done = (tile - f.first_tile) * kTileRows;
  const int left = f.rows - done;
  return {product, f.first_row + done, left < kTileRows ? left : kTileRows};
}

// A block for a panel of x A of a tile. Thread 16 c + j has chain c of column j of every row, and
// then the sum of all chains of column j of row c.
TREADLE_KERNEL(kThreads) void LowRankDownKernel(LowRankParams p) {
  simt::AwaitEarlierLaunches();
  const Tile tile = TileOf(p, simt::BlockX());
  const Factors& f = p.each[tile.product];
  const int64_t panel = simt::BlockY();
  if (panel * kPanel >= f.rank) return;
  const int column = simt::Thread() % kPanel, chain = simt::Thread() / kPanel;
  float sums[kTileRows] = {};
  if (f.a == nullptr) {
    const int64_t at = panel * kPanel + column;
    TREADLE_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      if (chain > 0 || row >= tile.rows || at >= p.k) continue;
      sums[row] = Load(p.x_type, p.x, p.rows[tile.first + row] * p.x_stride + at);
    }
  } else {
    const int length = (p.k + kChains - 1) / kChains;
    const int end = (chain + 1) * length < p.k ? (chain + 1) * length : p.k;
    for (int i = chain * length; i < end; ++i) {
      const float factor = Load(f.type, f.a, (panel * p.k + i) * kPanel + column);
      TREADLE_UNROLL
      for (int row = 0; row < kTileRows; ++row) {
        if (row >= tile.rows) continue;
        const float x = Load(p.x_type, p.x, p.rows[tile.first + row] * p.x_stride + i);
        sums[row] = simt::Fma(x, factor, sums[row]);
      }
    }
  }
  float* const chains = simt::DynamicShared<float>();  // [kTileRows][kChains][kPanel]
  TREADLE_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    chains[row * kThreads + simt::Thread()] = sums[row];
  }
  simt::SyncThreads();
  const int row = chain;
  if (row >= tile.rows) return;
  const float* const of_row = chains + row * kThreads + column;
  const auto two = [of_row](int c) { return of_row[c * kPanel] + of_row[(c + 1) * kPanel]; };
  p.inner[int64_t{tile.first + row} * p.width + panel * kPanel + column] =
      (two(0) + two(2)) + (two(4) + two(6));
}

// A block for kThreads columns of a tile's rows of the output.
TREADLE_KERNEL(kThreads) void LowRankUpKernel(LowRankParams p) {
  simt::AwaitEarlierLaunches();
  const Tile tile = TileOf(p, simt::BlockX());
  const Factors& f = p.each[tile.product];
  const int64_t column = int64_t{simt::BlockY()} * kThreads + simt::Thread();
  if (column >= f.n) return;
  const float* const inner = p.inner + int64_t{tile.first} * p.width;
  float sums[kTileRows] = {};
  for (int j = 0; j < f.rank; ++j) {
    const float factor =
        Load(f.type, f.b, (column / kPanel * f.rank + j) * kPanel + column % kPanel);
    TREADLE_UNROLL
    for (int row = 0; row < kTileRows; ++row) {
      if (row < tile.rows) sums[row] = simt::Fma(inner[row * p.width + j], factor, sums[row]);
    }
  }
  TREADLE_UNROLL
  for (int row = 0; row < kTileRows; ++row) {
    if (row < tile.rows) f.out[p.rows[tile.first + row] * f.out_stride + column] += sums[row];
  }
}

// The parts of some products that fit into a launch, and what its grids are.
struct LowRankLaunch {
  LowRankParams params;
  int32_t rows = 0;
  int32_t tiles = 0;
  int64_t panels = 0;
  int64_t column_blocks = 0;

  // Takes rows of the product, the first ones; returns how many, 0: it is full.
  size_t Add(const LowRankProduct& product, std::span<const int32_t> of) {
    const auto& [by, all, out] = product;
    const size_t taken = std::min(of.size(), static_cast<size_t>(kMaxRows - rows));
    if (taken == 0 || params.products == kMaxProducts) return 0;
    TREADLE_CHECK(by.type != DType::kI8 && (by.a != nullptr || params.k == by.rank));
    std::copy_n(of.begin(), taken, params.rows + rows);
    const auto count = static_cast<int32_t>(taken);
    params.each[params.products++] = {by.a,
                                      by.b,
                                      out.Row<float>(0),
                                      out.stride,
                                      static_cast<int32_t>(by.rank),
                                      static_cast<int32_t>(out.cols),
                                      rows,
                                      count,
                                      tiles,
                                      by.type};
    rows += count;
    tiles += (count + kTileRows - 1) / kTileRows;
    panels = std::max(panels, LowRankPanels(by.rank));
    column_blocks = std::max(column_blocks, (out.cols + kThreads - 1) / kThreads);
    return taken;
  }

  void Run(Device& device) const {
    if (tiles == 0) return;
    const auto blocks = static_cast<uint32_t>(tiles);
    device.Launch(LowRankDownKernel,
                  {.grid_x = blocks,
                   .grid_y = static_cast<uint32_t>(panels),
                   .threads = kThreads,
                   .shared_bytes = kTileRows * kThreads * sizeof(float)},
                  params);
    device.Launch(
        LowRankUpKernel,
        {.grid_x = blocks, .grid_y = static_cast<uint32_t>(column_blocks), .threads = kThreads},
        params);
  }
};

}  // namespace

void CudaOps::AddLowRank(Tensor x, std::span<const LowRankProduct> products) {
  int64_t widest = 0;
  for (const LowRankProduct& product : products) {
    widest = std::max(widest, LowRankPanels(product.by.rank) * kLowRankPanel);
  }
  if (widest == 0 || !Ready()) return;
  Keep(ReserveScratch(static_cast<size_t>(kMaxRows * widest) * sizeof(float)));
  if (!Ready()) return;
  TREADLE_CHECK(x.dtype != DType::kI8);
  LowRankLaunch empty;
  empty.params.x = x.data;
  empty.params.x_stride = x.stride;
  empty.params.inner = reinterpret_cast<float*>(Scratch().data());
  empty.params.width = static_cast<int32_t>(widest);
  empty.params.k = static_cast<int32_t>(x.cols);
  empty.params.x_type = x.dtype;
  LowRankLaunch launch = empty;
  for (const LowRankProduct& product : products) {
    std::span<const int32_t> rows = product.rows;
    while (!rows.empty()) {
      const size_t taken = launch.Add(product, rows);
      rows = rows.subspan(taken);
      if (taken > 0) continue;
      launch.Run(*device_);
      launch = empty;
    }
  }
  launch.Run(*device_);
}

}  // namespace treadle::cuda
