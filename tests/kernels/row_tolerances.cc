// Norms and activations.
#include <cmath>
#include <numeric>

#include "tests/kernels/op_tolerances.h"

namespace treadle {
namespace {

constexpr float kEps = 1e-5f;  // row_cases.cc

// The input, which is the output in place.
const GuardedTensor& InputOf(const OpRun& run) {
  const bool in_place = run.tensors[1].name() != "x";
  return run.tensor(in_place ? "out" : "x");
}

std::span<const float> RowOf(const GuardedTensor& tensor, int64_t row) {
  return {tensor.Row(row), static_cast<size_t>(tensor.cols())};
}

}  // namespace

// Sums of up to cols terms in 16 parts, and a few roundings of the factors.
std::vector<float> NormTolerance(const OpRun& run, const Arithmetic&) {
  const OpCase& c = run.op_case();
  const GuardedTensor& input = InputOf(run);
  const float* const weight = run.tensor("weight").Row(0);
  const float* const bias = run.tensor("bias").Row(0);
  const double unit = kFloatUnit * (8 + std::sqrt(static_cast<double>(c.cols)) / 4);
  std::vector<float> tolerance;
  for (int64_t row = 0; row < c.rows; ++row) {
    const auto x = RowOf(input, row);
    double squares = 0;
    double sum = 0;
    for (float value : x) {
      squares += double{value} * value;
      sum += value;
    }
    const double n = static_cast<double>(c.cols);
    const bool layer = c.op == Op::kLayerNorm;
    const double mean = layer ? sum / n : 0;
    const double scale = 1 / std::sqrt(squares / n - mean * mean + kEps);
    for (int64_t i = 0; i < c.cols; ++i) {
      const double moved = std::fabs(x[i]) + (layer ? std::sqrt(squares / n) : 0);
      const double shift = layer && c.bias ? std::fabs(bias[i])
                           : c.accumulate  ? std::fabs(run.tensor("out").Row(row)[i])
                                           : 0;
      tolerance.push_back(
          static_cast<float>(unit * (moved * scale * std::fabs(weight[i]) + shift)));
    }
  }
  return tolerance;
}
// SwiGLU: a dozen roundings of the value itself, of which exp brings its argument's, which is a
// product where SwiGLU is clamped. GeLU: 1 +
// tanh cancels for negative x, so the unit is x; GeGLU's is x times its factor.
std::vector<float> ActivationTolerance(const OpRun& run, const Arithmetic&) {
  const OpCase& c = run.op_case();
  const GuardedTensor& input = InputOf(run);
  const GuardedTensor& up = run.tensor("up");
  std::vector<float> tolerance;
  const std::vector<float> output = Output(run);
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.cols; ++i) {
      const double x = input.Row(row)[i];
      const double y = up.Row(row)[i];
      const double silu = x / (1 + std::exp(-x)) * y;
      const double clamped = output[static_cast<size_t>(row * c.cols + i)];
      const double unit = c.op == Op::kSwiGlu ? 12 * std::fabs(silu)
                          : c.op == Op::kClampedSwiGlu
                              ? (12 + 4 * std::fabs(x)) * std::fabs(clamped)
                          : c.op == Op::kGeGlu ? 7 * std::fabs(x * y)
                                               : 6 * std::fabs(x);
      tolerance.push_back(static_cast<float>(kFloatUnit * unit + 0x1p-126));
    }
  }
  return tolerance;
}

// The ids are what they are. Each weight: a difference, exp of it, a sum, and a quotient, where the
// difference of logits of this size brings the most.
std::vector<float> RouteTolerance(const OpRun& run, const Arithmetic&) {
  const OpCase& c = run.op_case();
  std::vector<float> tolerance(static_cast<size_t>(c.rows * c.chosen), 0.0f);
  const std::vector<float> output = Output(run);
  for (size_t i = tolerance.size(); i < output.size(); ++i) {
    tolerance.push_back(static_cast<float>(kFloatUnit * 40) * output[i] + 0x1p-126f);
  }
  return tolerance;
}
std::vector<float> MixTolerance(const OpRun& run, const Arithmetic&) {
  const OpCase& c = run.op_case();
  std::vector<float> tolerance;
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t i = 0; i < c.cols; ++i) {
      double sum = c.accumulate ? std::fabs(run.tensor("out").Row(row)[i]) : 0;
      for (int64_t j = 0; j < c.chosen; ++j) {
        const int32_t place = run.ids[static_cast<size_t>(row * c.chosen + j)];
        sum += std::fabs(run.tensor("weights").Row(row)[j] * run.tensor("x").Row(place)[i]);
      }
      tolerance.push_back(static_cast<float>(kFloatUnit * static_cast<double>(c.chosen + 2) * sum));
    }
  }
  return tolerance;
}

}  // namespace treadle
