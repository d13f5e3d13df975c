// Convolve: a thread for each channel of a sequence, over its rows. Contract: kernels/backend.h.
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/states/state_pages.h"

namespace treadle::cuda {
namespace {

constexpr int kThreads = 128;

struct ConvolveParams {
  StatePages pages;
  const float* x;  // [rows, channels]
  float* out;      // likewise; may be x
  int64_t x_stride;
  int64_t out_stride;
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels] or null
  int32_t channels;
  int32_t taps;
  bool silu;
};

// Grid: channels, sequences.
TREADLE_KERNEL(kThreads) void ConvolveKernel(ConvolveParams p) {
  simt::AwaitEarlierLaunches();
  const int channel = simt::BlockX() * kThreads + simt::Thread();
  if (channel >= p.channels) return;
  const int64_t channels = p.channels;
  for (int32_t round = 0;; ++round) {
    const PageRows r = RowsIn(p.pages, simt::BlockY(), round);
    if (r.rows == 0) return;
    float* const inputs = r.page + channel;
    for (int t = 0; r.slot == 0 && t + 1 < p.taps; ++t) {
      const float* const before = r.before;
      inputs[t * channels] =
          before == nullptr ? 0.0f : before[(p.pages.page_size + t) * channels + channel];
    }
    for (int32_t i = 0; i < r.rows; ++i) {
      float* const seen = inputs + (r.slot + i) * channels;
      seen[(p.taps - 1) * channels] = p.x[(r.row + i) * p.x_stride + channel];
      float sum = p.bias == nullptr ? 0.0f : p.bias[channel];
      for (int t = 0; t < p.taps; ++t) {
        sum = simt::Fma(p.weight[t * channels + channel], seen[t * channels], sum);
      }
      if (p.silu) sum = simt::Divide(sum, 1.0f + simt::Exp(-sum));
      p.out[(r.row + i) * p.out_stride + channel] = sum;
    }
  }
}

}  // namespace

void CudaOps::Convolve(Tensor x, const float* weight, const float* bias, bool silu,
                       const KvView& kv, Tensor out) {
  const StateLayout& state = kv.layout.state;
  TREADLE_CHECK(x.rows == out.rows && x.cols == out.cols && x.cols == state.channels);
  TREADLE_CHECK(x.dtype == DType::kF32 && out.dtype == DType::kF32);
  const auto batch = Upload(kv, x.rows);
  if (!batch) return;
  device_->Launch(ConvolveKernel,
                  {.grid_x = static_cast<uint32_t>((x.cols + kThreads - 1) / kThreads),
                   .grid_y = static_cast<uint32_t>(batch->num_sequences),
                   .threads = kThreads},
                  ConvolveParams{StatePages(kv, *batch), x.Row<float>(0), out.Row<float>(0),
                                 x.stride, out.stride, weight, bias, static_cast<int32_t>(x.cols),
                                 static_cast<int32_t>(state.taps), silu});
}

}  // namespace treadle::cuda
