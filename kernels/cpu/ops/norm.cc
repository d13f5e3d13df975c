// RmsNorm and LayerNorm: one row at a time, 16 partial sums over the columns.
#include "kernels/cpu/isa_kernel.h"

namespace treadle {

// `rows` rows. x, out: [rows, cols]; strides count elements.
struct NormArguments {
  const float* x;
  int64_t x_stride;
  float* out;
  int64_t out_stride;
  int64_t rows;
  int64_t cols;
  const float* weight;  // [cols]
  const float* bias;    // [cols] or null; LayerNorm's
  float eps;
  bool accumulate;  // RmsNorm's
};
TREADLE_ISA_KERNEL(RmsNormRows, void(const NormArguments&));
TREADLE_ISA_KERNEL(LayerNormRows, void(const NormArguments&));

}  // namespace treadle

#ifdef TREADLE_ISA
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {

void RmsNormRows(const NormArguments& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.out_stride;
    Vec squares = Zero();
    ForEachVec(a.cols, [&](int64_t i, int64_t lanes) {
      const Vec value = LoadLanes(x + i, lanes);
      squares = Fma(value, value, squares);
    });
    const float mean = Sum(squares) / static_cast<float>(a.cols);
    const Vec inverse = Broadcast(1.0f / Sqrt(mean + a.eps));
    ForEachVec(a.cols, [&](int64_t i, int64_t lanes) {
      const Vec normal = Mul(LoadLanes(x + i, lanes), inverse);
      const Vec weighted = Mul(normal, LoadLanes(a.weight + i, lanes));
      StoreLanes(out + i, a.accumulate ? Add(LoadLanes(out + i, lanes), weighted) : weighted,
                 lanes);
    });
  }
}

void LayerNormRows(const NormArguments& a) {
  const float count = static_cast<float>(a.cols);
  for (int64_t row = 0; row < a.rows; ++row) {
    const float* x = a.x + row * a.x_stride;
    float* out = a.out + row * a.out_stride;
    Vec sum = Zero();
    ForEachVec(a.cols, [&](int64_t i, int64_t lanes) { sum = Add(sum, LoadLanes(x + i, lanes)); });
    const Vec mean = Broadcast(Sum(sum) / count);
    Vec squares = Zero();
    ForEachVec(a.cols, [&](int64_t i, int64_t lanes) {
      const Vec difference = Sub(LoadLanes(x + i, lanes), mean);
      squares = Select(FirstLanes(lanes), Fma(difference, difference, squares), squares);
    });
    const Vec inverse = Broadcast(1.0f / Sqrt(Sum(squares) / count + a.eps));
    ForEachVec(a.cols, [&](int64_t i, int64_t lanes) {
      const Vec normal = Mul(Sub(LoadLanes(x + i, lanes), mean), inverse);
      const Vec bias = a.bias == nullptr ? Zero() : LoadLanes(a.bias + i, lanes);
      StoreLanes(out + i, Fma(normal, LoadLanes(a.weight + i, lanes), bias), lanes);
    });
  }
}

}  // namespace treadle::TREADLE_ISA
#else
#include "kernels/cpu/ops/cpu_ops.h"
#include "kernels/cpu/ops/split_rows.h"

namespace treadle {
namespace {

NormArguments NormRows(const Tensor& x, const float* weight, const float* bias, float eps,
                       bool accumulate, const Tensor& out, int64_t begin, int64_t end) {
  return {x.Row<float>(begin),
          x.stride,
          out.Row<float>(begin),
          out.stride,
          end - begin,
          x.cols,
          weight,
          bias,
          eps,
          accumulate};
}

}  // namespace

void CpuOps::RmsNorm(Tensor x, const float* weight, float eps, bool accumulate, Tensor out) {
  CheckSameShape(x, out);
  SplitRows(pool_, x.rows, x.cols, [&](int64_t begin, int64_t end) {
    kRmsNormRows[isa_](NormRows(x, weight, nullptr, eps, accumulate, out, begin, end));
  });
}

void CpuOps::LayerNorm(Tensor x, const float* weight, const float* bias, float eps, Tensor out) {
  CheckSameShape(x, out);
  SplitRows(pool_, x.rows, x.cols, [&](int64_t begin, int64_t end) {
    kLayerNormRows[isa_](NormRows(x, weight, bias, eps, /*accumulate=*/false, out, begin, end));
  });
}

}  // namespace treadle
#endif
