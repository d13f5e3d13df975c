#include <algorithm>

#include "kernels/cuda/rows/rank_sum.h"
#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 256;
// Blocks walk over larger sums: no grid is larger than what fills a GPU a few times.
constexpr int64_t kMaxBlocks = 2048;

struct RankSumParams {
  const float* parts;  // [ranks][count]
  float* out;          // [count]
  int64_t count;
  int ranks;
  bool accumulate;
};

TREADLE_KERNEL(kThreads) void RankSumKernel(RankSumParams p) {
  simt::AwaitEarlierLaunches();
  const int64_t step = int64_t{simt::GridX()} * kThreads;
  for (int64_t i = int64_t{simt::BlockX()} * kThreads + simt::Thread(); i < p.count; i += step) {
    float sum = p.parts[i];
    for (int r = 1; r < p.ranks; ++r) sum += p.parts[r * p.count + i];
    p.out[i] = p.accumulate ? p.out[i] + sum : sum;
  }
}

}  // namespace

void RankSum(Device& device, const float* parts, int ranks, int64_t count, bool accumulate,
             float* out) {
  if (count == 0) return;
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMaxBlocks);
  device.Launch(RankSumKernel, {.grid_x = static_cast<uint32_t>(blocks), .threads = kThreads},
                RankSumParams{parts, out, count, ranks, accumulate});
}

}  // namespace treadle::cuda
