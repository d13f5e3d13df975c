// Convolve: the short convolution of layers that keep a state (kernels/state_layout.h).
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// Some columns of rows that lie in one page.
struct ConvolveArguments {
  const float* x;  // [rows, columns]
  int64_t x_stride;
  float* inputs;  // [taps - 1 + page_size, columns], `channels` apart; the rows' own ones are made
  int64_t channels;
  bool begins;          // the rows are the page's first: its first taps - 1 inputs are made, too,
  const float* before;  // from these; null: zeros
  int64_t slot;         // of the first row
  int64_t rows;
  int64_t columns;
  int64_t taps;
  const float* weight;  // [taps, columns], `channels` apart
  const float* bias;    // or null
  bool silu;
  float* out;  // [rows, columns]
  int64_t out_stride;
};
TREADLE_ISA_KERNEL(ConvolveRows, void(const ConvolveArguments&));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/vector_math.h"

namespace treadle::TREADLE_ISA {

void ConvolveRows(const ConvolveArguments& a) {
  ForEachVec(a.columns, [&](int64_t i, int64_t lanes) {
    for (int64_t t = 0; a.begins && t + 1 < a.taps; ++t) {
      const Vec x = a.before == nullptr ? Zero() : LoadLanes(a.before + t * a.channels + i, lanes);
      StoreLanes(a.inputs + t * a.channels + i, x, lanes);
    }
    for (int64_t row = 0; row < a.rows; ++row) {
      float* const first = a.inputs + (a.slot + row) * a.channels + i;
      StoreLanes(first + (a.taps - 1) * a.channels, LoadLanes(a.x + row * a.x_stride + i, lanes),
                 lanes);
      Vec sum = a.bias == nullptr ? Zero() : LoadLanes(a.bias + i, lanes);
      for (int64_t t = 0; t < a.taps; ++t) {
        sum = Fma(LoadLanes(a.weight + t * a.channels + i, lanes),
                  LoadLanes(first + t * a.channels, lanes), sum);
      }
      StoreLanes(a.out + row * a.out_stride + i, a.silu ? Silu(sum) : sum, lanes);
    }
  });
}

}  // namespace treadle::TREADLE_ISA
#else
#include "kernels/cpu/ops/ops_state.h"
#include "kernels/cpu/ops/split_rows.h"
#include "kernels/cpu/ops/state_rows.h"

namespace treadle {

void CpuOps::Convolve(Tensor x, const float* weight, const float* bias, bool silu, const KvView& kv,
                      Tensor out) {
  const StateLayout& state = kv.layout.state;
  CheckSameShape(x, out);
  TREADLE_CHECK(x.cols == state.channels);
  const auto convolve = [&](int64_t begin, int64_t end) {  // channels
    for (const SequenceSpan& span : kv.sequences) {
      for (int64_t i = 0; i < PagesOf(kv, span); ++i) {
        const PageRows p = RowsIn(kv, span, i);
        const float* before = p.before;
        if (before != nullptr) before += kv.layout.page_size * state.channels + begin;
        kConvolveRows[isa_]({x.Row<float>(p.row) + begin, x.stride, p.page + begin, state.channels,
                             p.slot == 0, before, p.slot, p.rows, end - begin, state.taps,
                             weight + begin, bias == nullptr ? nullptr : bias + begin, silu,
                             out.Row<float>(p.row) + begin, out.stride});
      }
    }
  };
  if (x.rows * x.cols < kSerialElements) return convolve(0, x.cols);
  pool_.ParallelFor(x.cols, 64, convolve);
}

}  // namespace treadle
#endif
