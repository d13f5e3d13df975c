// The reference's ops on rows of features: norms and activations.
#include <algorithm>
#include <cmath>

#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

double GeluTanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

}  // namespace

void ReferenceBackend::RmsNorm(Tensor x, const float* weight, float eps, bool accumulate,
                               Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    const float* from = x.Row<float>(row);
    double squares = 0;
    for (int64_t i = 0; i < x.cols; ++i) squares += double{from[i]} * from[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.cols) + eps);
    float* to = out.Row<float>(row);
    for (int64_t i = 0; i < x.cols; ++i) {
      to[i] = static_cast<float>(from[i] * scale * weight[i] + (accumulate ? to[i] : 0.0));
    }
  }
}

void ReferenceBackend::LayerNorm(Tensor x, const float* weight, const float* bias, float eps,
                                 Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    const float* from = x.Row<float>(row);
    const double count = static_cast<double>(x.cols);
    double sum = 0;
    for (int64_t i = 0; i < x.cols; ++i) sum += from[i];
    const double mean = sum / count;
    double squares = 0;
    for (int64_t i = 0; i < x.cols; ++i) squares += (from[i] - mean) * (from[i] - mean);
    const double scale = 1 / std::sqrt(squares / count + eps);
    float* to = out.Row<float>(row);
    for (int64_t i = 0; i < x.cols; ++i) {
      const double shift = bias == nullptr ? 0.0 : bias[i];
      to[i] = static_cast<float>((from[i] - mean) * scale * weight[i] + shift);
    }
  }
}

void ReferenceBackend::SwiGlu(Tensor gate, Tensor up, Tensor out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      const double x = gate.Row<float>(row)[i];
      const double silu = x / (1 + std::exp(-x));
      out.Row<float>(row)[i] = static_cast<float>(silu * up.Row<float>(row)[i]);
    }
  }
}

void ReferenceBackend::ClampedSwiGlu(Tensor gate, Tensor up, float limit, Tensor out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      const double x = std::min(gate.Row<float>(row)[i], limit);
      const double more = std::clamp(up.Row<float>(row)[i], -limit, limit);
      out.Row<float>(row)[i] = static_cast<float>((more + 1) * x / (1 + std::exp(-1.702 * x)));
    }
  }
}

void ReferenceBackend::GeGlu(Tensor gate, Tensor up, Tensor out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      out.Row<float>(row)[i] =
          static_cast<float>(GeluTanh(gate.Row<float>(row)[i]) * up.Row<float>(row)[i]);
    }
  }
}

void ReferenceBackend::SigmoidGate(Tensor gate, Tensor x, Tensor out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      const double by = gate.Row<float>(row)[gate.cols == 1 ? 0 : i];
      out.Row<float>(row)[i] = static_cast<float>(x.Row<float>(row)[i] / (1 + std::exp(-by)));
    }
  }
}

void ReferenceBackend::Multiply(Tensor x, Tensor y, Tensor out) {
  for (int64_t row = 0; row < out.rows; ++row) {
    for (int64_t i = 0; i < out.cols; ++i) {
      out.Row<float>(row)[i] = x.Row<float>(row)[i] * y.Row<float>(row)[i];
    }
  }
}

void ReferenceBackend::Gelu(Tensor x, Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t i = 0; i < x.cols; ++i) {
      out.Row<float>(row)[i] = static_cast<float>(GeluTanh(x.Row<float>(row)[i]));
    }
  }
}

void ReferenceBackend::GeluErf(Tensor x, Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t i = 0; i < x.cols; ++i) {
      const double v = x.Row<float>(row)[i];
      out.Row<float>(row)[i] = static_cast<float>(0.5 * v * std::erfc(-v / M_SQRT2));
    }
  }
}

void ReferenceBackend::SoftCap(Tensor x, float cap, Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t i = 0; i < x.cols; ++i) {
      out.Row<float>(row)[i] =
          static_cast<float>(cap * std::tanh(double{x.Row<float>(row)[i]} / cap));
    }
  }
}

void ReferenceBackend::Xielu(Tensor x, const XieluScales& s, Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t i = 0; i < x.cols; ++i) {
      const double v = x.Row<float>(row)[i];
      const double curve = v > 0 ? s.positive * v * v
                                 : s.negative * (std::expm1(std::fmin(v, double{s.largest})) - v);
      out.Row<float>(row)[i] = static_cast<float>(std::isnan(v) ? v : curve + s.slope * v);
    }
  }
}

void ReferenceBackend::Relu(Tensor x, Tensor out) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (int64_t i = 0; i < x.cols; ++i) {
      out.Row<float>(row)[i] = std::max(x.Row<float>(row)[i], 0.0f);
    }
  }
}

}  // namespace treadle
