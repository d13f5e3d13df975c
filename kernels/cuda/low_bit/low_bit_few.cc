// Launches of the few-rows kernel.
#include "kernels/cuda/low_bit/low_bit_few.h"

#include <algorithm>

namespace treadle::cuda {
namespace {

// Whether one launch can do both.
bool SameKernel(const LowBitView& a, const LowBitView& b) {
  return a.bits == b.bits && a.granule == b.granule &&
         (a.second == Second::kNone) == (b.second == Second::kNone);
}

void LaunchTogether(Device& device, const MatMulInput& input,
                    std::span<const LowBitProduct> products) {
  const bool one_tile = input.x.rows <= kTileRows;
  FewRowsParams p;
  p.x = input.x16;
  p.stride = input.stride16;
  p.rows = static_cast<int32_t>(input.x.rows);
  for (const LowBitProduct& product : products) {
    p.segments[p.num_segments++] = {{product.bias, product.out, product.accumulate}, product.w};
  }
  p.bands = NumberTiles(p, kBandFeatures);
  const LowBitView& w = products.front().w;
  const int rows = (one_tile ? 1 : kFewTiles) * kTileRows;
  const auto find =
      input.dtype == DType::kBF16 ? low_bit::FindFewRows<true> : low_bit::FindFewRows<false>;
  const FewRowsFunction kernel = find(w, one_tile);
  LaunchShape shape = {.grid_y = static_cast<uint32_t>((p.rows + rows - 1) / rows),
                       .threads = kFewThreads,
                       .shared_bytes = kTableBytes + sizeof(float) * kFewWarps * rows * kSumStride};
  // No more blocks than run at the same time: each fills its table once.
  const int most = device.properties().multiprocessors * device.Resident(kernel, shape);
  shape.grid_x = static_cast<uint32_t>(std::min(p.bands, most));
  device.Launch(kernel, shape, p);
}

}  // namespace

void LowBitFewRows(Device& device, const MatMulInput& input,
                   std::span<const LowBitProduct> products) {
  TREADLE_CHECK(input.x16 != nullptr && input.stride16 % 8 == 0);
  while (!products.empty()) {
    size_t together = 1;
    while (together < std::min<size_t>(products.size(), kMaxFewSegments) &&
           SameKernel(products[0].w, products[together].w)) {
      ++together;
    }
    LaunchTogether(device, input, products.first(together));
    products = products.subspan(together);
  }
}

}  // namespace treadle::cuda
