// Norms, activations, copies and mixtures of experts.
#include <cmath>
#include <map>

#include "kernels/op_cases/tolerant_reference.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

// The error of x / scale * weight + shift: sums of up to x.cols terms in 16 parts, and roundings of
// the factors. bias: likewise, or null; before: what the result is added to, or without rows.
void NormError(Tensor x, const float* weight, const float* bias, float eps, bool centred,
               Tensor before, float* error) {
  const auto n = static_cast<double>(x.cols);
  const double unit = kFloatUnit * (8 + std::sqrt(n) / 4);
  for (int64_t row = 0; row < x.rows; ++row) {
    const float* const values = x.Row<float>(row);
    double squares = 0;
    double sum = 0;
    for (int64_t i = 0; i < x.cols; ++i) {
      squares += double{values[i]} * values[i];
      sum += values[i];
    }
    const double mean = centred ? sum / n : 0;
    const double scale = 1 / std::sqrt(squares / n - mean * mean + eps);
    for (int64_t i = 0; i < x.cols; ++i) {
      const double moved = std::fabs(values[i]) + (centred ? std::sqrt(squares / n) : 0);
      const double shift = bias != nullptr   ? std::fabs(bias[i])
                           : before.rows > 0 ? std::fabs(before.Row<float>(row)[i])
                                             : 0;
      *error++ = static_cast<float>(unit * (moved * scale * std::fabs(weight[i]) + shift));
    }
  }
}

}  // namespace

TolerantReference::TolerantReference(const Arithmetic& arithmetic)
    : ForwardingBackend(CreateReferenceBackend(arithmetic.compute)), arithmetic_(arithmetic) {}

float* TolerantReference::Writes(Tensor tensor, std::string part) {
  OpTolerances::Output& output =
      tolerances_.outputs.emplace_back(OpTolerances::Output{tensor, std::move(part)});
  output.error.resize(static_cast<size_t>(tensor.rows * tensor.cols));
  return output.error.data();
}

template <typename Units>
void TolerantReference::WritesElements(Tensor gate, Tensor up, Tensor out, Units units) {
  Begin();
  float* error = Writes(out);
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      const double of = units(gate.Row<float>(row)[i], up.Row<float>(row)[i]);
      *error++ = static_cast<float>(kFloatUnit * of + 0x1p-126);
    }
  }
}

void TolerantReference::RmsNorm(Tensor x, const float* weight, float eps, bool accumulate,
                                Tensor out) {
  Begin();
  NormError(x, weight, nullptr, eps, /*centred=*/false, accumulate ? out : Tensor(), Writes(out));
  below().RmsNorm(x, weight, eps, accumulate, out);
}

void TolerantReference::LayerNorm(Tensor x, const float* weight, const float* bias, float eps,
                                  Tensor out) {
  Begin();
  NormError(x, weight, bias, eps, /*centred=*/true, Tensor(), Writes(out));
  below().LayerNorm(x, weight, bias, eps, out);
}

// A dozen roundings of the value itself, of which exp brings its argument's.
void TolerantReference::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  WritesElements(gate, up, out,
                 [](double x, double y) { return 12 * std::fabs(x / (1 + std::exp(-x)) * y); });
  below().SwiGlu(gate, up, out);
}

// Here exp's argument is a product.
void TolerantReference::ClampedSwiGlu(Tensor gate, Tensor up, float limit, Tensor out) {
  WritesElements(gate, up, out, [limit](double x, double y) {
    const double g = std::fmin(x, limit);
    const double value =
        (std::clamp<double>(y, -limit, limit) + 1) * g / (1 + std::exp(-1.702 * g));
    return (12 + 4 * std::fabs(x)) * std::fabs(value);
  });
  below().ClampedSwiGlu(gate, up, limit, out);
}

// 1 + tanh and 1 + erf cancel for negative x, so GeLU's unit is x; GeGLU's is x times its factor.
void TolerantReference::GeGlu(Tensor gate, Tensor up, Tensor out) {
  WritesElements(gate, up, out, [](double x, double y) { return 7 * std::fabs(x * y); });
  below().GeGlu(gate, up, out);
}
void TolerantReference::SigmoidGate(Tensor gate, Tensor x, Tensor out) {
  WritesElements(x, x, out, [](double value, double) { return 12 * std::fabs(value); });
  below().SigmoidGate(gate, x, out);
}
void TolerantReference::Multiply(Tensor x, Tensor y, Tensor out) {
  WritesElements(x, y, out, [](double, double) { return 0; });
  below().Multiply(x, y, out);
}
void TolerantReference::Gelu(Tensor x, Tensor out) {
  WritesElements(x, x, out, [](double x, double) { return 6 * std::fabs(x); });
  below().Gelu(x, out);
}
void TolerantReference::GeluErf(Tensor x, Tensor out) {
  WritesElements(x, x, out, [](double x, double) { return 6 * std::fabs(x); });
  below().GeluErf(x, out);
}

// A dozen roundings of the quotient, and of the cap's product with it.
void TolerantReference::SoftCap(Tensor x, float cap, Tensor out) {
  WritesElements(x, x, out,
                 [cap](double v, double) { return 12 * std::fabs(cap * std::tanh(v / cap)); });
  below().SoftCap(x, cap, out);
}

// expm1(x) - x cancels: its unit is x.
void TolerantReference::Xielu(Tensor x, const XieluScales& s, Tensor out) {
  WritesElements(x, x, out, [s](double v, double) {
    const double curve = v > 0 ? s.positive * v * v : s.negative * 4 * v;
    return 4 * (std::fabs(curve) + std::fabs(s.slope * v));
  });
  below().Xielu(x, s, out);
}

void TolerantReference::Relu(Tensor x, Tensor out) {
  Begin();
  Writes(out);
  below().Relu(x, out);
}

// The ids are what they are. Each weight: a difference, exp of it, a sum, and a quotient, where the
// difference of logits of this size brings the most.
void TolerantReference::Route(Tensor logits, const Routing& routing, Tensor ids, Tensor weights) {
  below().Route(logits, routing, ids, weights);
  Begin();
  Writes(ids, "experts");
  float* error = Writes(weights, "weights");
  for (int64_t row = 0; row < weights.rows; ++row) {
    for (int64_t j = 0; j < weights.cols; ++j) {
      *error++ = static_cast<float>(kFloatUnit * 40) * weights.Row<float>(row)[j] + 0x1p-126f;
    }
  }
}

void TolerantReference::Mix(Tensor x, std::span<const int32_t> places, Tensor weights,
                            bool accumulate, Tensor out) {
  Begin();
  float* error = Writes(out);
  const double unit = kFloatUnit * static_cast<double>(weights.cols + 2);
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      double sum = accumulate ? std::fabs(out.Row<float>(row)[i]) : 0;
      for (int64_t j = 0; j < weights.cols; ++j) {
        const int32_t place = places[static_cast<size_t>(row * weights.cols + j)];
        sum += std::fabs(weights.Row<float>(row)[j] * x.Row<float>(place)[i]);
      }
      *error++ = static_cast<float>(unit * sum);
    }
  }
  below().Mix(x, places, weights, accumulate, out);
}

// The roundings of x A, brought by B, and those of the sum itself.
void TolerantReference::AddLowRank(Tensor x, std::span<const LowRankProduct> products) {
  Begin();
  std::map<const void*, float*> errors;  // by output
  for (const LowRankProduct& product : products) {
    float*& of = errors[product.out.data];
    if (of == nullptr) of = Writes(product.out);
  }
  for (const auto& [by, rows, out] : products) {
    for (const int32_t row : rows) {
      std::vector<double> sizes(static_cast<size_t>(by.rank));
      for (int64_t j = 0; j < by.rank; ++j) {
        for (int64_t i = 0; i < x.cols; ++i) {
          const double factor = by.a == nullptr
                                    ? (i == j ? 1.0 : 0.0)
                                    : LoadElement(by.type, by.a, LowRankAt(x.cols, i, j));
          sizes[static_cast<size_t>(j)] += std::fabs(x.Row<float>(row)[i] * factor);
        }
      }
      for (int64_t i = 0; i < out.cols; ++i) {
        double size = std::fabs(out.Row<float>(row)[i]);
        for (int64_t j = 0; j < by.rank; ++j) {
          size += sizes[static_cast<size_t>(j)] *
                  std::fabs(LoadElement(by.type, by.b, LowRankAt(by.rank, j, i)));
        }
        const double units = 8 + std::sqrt(static_cast<double>(x.cols / 4 + by.rank));
        errors[out.data][row * out.cols + i] = static_cast<float>(kFloatUnit * units * size);
      }
    }
  }
  below().AddLowRank(x, products);
}

void TolerantReference::Gather(Tensor x, std::span<const int32_t> rows, Tensor out) {
  Begin();
  Writes(out);
  below().Gather(x, rows, out);
}

void TolerantReference::Copy(Tensor x, Tensor out) {
  Begin();
  Writes(out);
  below().Copy(x, out);
}

}  // namespace treadle
