// RmsNorm and LayerNorm: one row at a time, 16 partial sums over the columns.
#include "kernels/cpu/isa_kernels.h"
#include "kernels/cpu/simd.h"

namespace treadle::TREADLE_ISA {

void RmsNorm(const NormArguments& a) {
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
      StoreLanes(out + i, Mul(normal, LoadLanes(a.weight + i, lanes)), lanes);
    });
  }
}

void LayerNorm(const NormArguments& a) {
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
