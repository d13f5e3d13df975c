#include "training/ops/reference_gradients.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/status.h"

namespace treadle {
namespace {

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The slope of GPT-2's GeLU: x times the logistic function of t, with t = 2u.
double GeluSlope(double x, double* value) {
  const double root = std::sqrt(2 / std::acos(-1.0));
  const double gate = Sigmoid(2 * root * (x + 0.044715 * x * x * x));
  *value = x * gate;
  return gate + x * gate * (1 - gate) * 2 * root * (1 + 3 * 0.044715 * x * x);
}
double SiluSlope(double x, double* value) {
  const double gate = Sigmoid(x);
  *value = x * gate;
  return gate + x * gate * (1 - gate);
}

void Add(float& to, double more) { to = static_cast<float>(to + more); }

class ReferenceGradients final : public GradientOps {
 public:
  explicit ReferenceGradients(Backend& backend) : backend_(backend) {}

  void ProductGradient(const PackedMatrix& weight, Tensor dy, Tensor dx) override {
    std::vector<float> row(static_cast<size_t>(weight.k()));
    std::vector<double> sums(static_cast<size_t>(dx.rows * dx.cols));
    for (int32_t n = 0; n < weight.n(); ++n) {
      backend_.Embed(weight, {&n, 1}, 0, false,
                     DenseTensor(row.data(), DType::kF32, 1, weight.k()));
      for (int64_t i = 0; i < dx.rows; ++i) {
        for (int64_t k = 0; k < dx.cols; ++k) {
          sums[i * dx.cols + k] += double{dy.Row<float>(i)[n]} * row[k];
        }
      }
    }
    for (int64_t i = 0; i < dx.rows; ++i) {
      for (int64_t k = 0; k < dx.cols; ++k) Add(dx.Row<float>(i)[k], sums[i * dx.cols + k]);
    }
  }

  void LowRankGradient(const LowRankUpdate& u, Tensor x, Tensor dy, Tensor dx) override {
    const int64_t rank = u.factors.rank;
    std::vector<double> da(static_cast<size_t>(rank * u.k)), db(static_cast<size_t>(rank * u.n));
    for (int64_t i = 0; i < x.rows; ++i) {
      for (int64_t r = 0; r < rank; ++r) {
        double inner = 0, dinner = 0;  // of x A^T
        for (int64_t k = 0; k < u.k; ++k) inner += double{x.Row<float>(i)[k]} * u.a[r * u.k + k];
        for (int64_t n = 0; n < u.n; ++n) {
          const double dout = dy.Row<float>(i)[n];
          dinner += dout * u.b[n * rank + r];
          db[r * u.n + n] += dout * u.scale * inner;
        }
        for (int64_t k = 0; k < u.k; ++k) {
          da[r * u.k + k] += dinner * x.Row<float>(i)[k];
          Add(dx.Row<float>(i)[k], dinner * u.a[r * u.k + k]);
        }
      }
    }
    for (size_t i = 0; i < da.size(); ++i) Add(u.a_gradient[i], da[i]);
    for (size_t i = 0; i < db.size(); ++i) Add(u.b_gradient[i], db[i]);
  }

  void RmsNormGradient(Tensor x, const float* weight, float eps, Tensor dy, Tensor dx) override {
    const auto cols = static_cast<double>(x.cols);
    for (int64_t i = 0; i < x.rows; ++i) {
      double squares = 0, product = 0;
      for (int64_t k = 0; k < x.cols; ++k) squares += std::pow(double{x.Row<float>(i)[k]}, 2);
      const double inverse = 1 / std::sqrt(squares / cols + eps);
      for (int64_t k = 0; k < x.cols; ++k) {
        product += double{dy.Row<float>(i)[k]} * weight[k] * x.Row<float>(i)[k] * inverse;
      }
      for (int64_t k = 0; k < x.cols; ++k) {
        const double g = double{dy.Row<float>(i)[k]} * weight[k];
        Add(dx.Row<float>(i)[k], inverse * (g - x.Row<float>(i)[k] * inverse * product / cols));
      }
    }
  }

  void GatedGradient(bool gelu, Tensor gate, Tensor up, Tensor dout, Tensor dgate,
                     Tensor dup) override {
    for (int64_t i = 0; i < gate.rows; ++i) {
      for (int64_t k = 0; k < gate.cols; ++k) {
        const double x = gate.Row<float>(i)[k], d = dout.Row<float>(i)[k];
        double value = 0;
        const double slope = gelu ? GeluSlope(x, &value) : SiluSlope(x, &value);
        Add(dgate.Row<float>(i)[k], d * up.Row<float>(i)[k] * slope);
        Add(dup.Row<float>(i)[k], d * value);
      }
    }
  }

  void RotateBack(Tensor x, int64_t head_dim, const RotaryTable& rotary,
                  std::span<const SequenceSpan> sequences) override {
    const int64_t half = rotary.half_dim;
    for (const SequenceSpan& s : sequences) {
      for (int64_t i = 0; i < s.num_rows; ++i) {
        const int64_t angle = (s.first_position + i) * half;
        float* row = x.Row<float>(s.first_row + i);
        for (float* head = row; head < row + x.cols; head += head_dim) {
          for (int64_t j = 0; j < half; ++j) {
            const double c = rotary.cos[angle + j], sine = rotary.sin[angle + j];
            const double first = head[j], second = head[j + half];
            head[j] = static_cast<float>(first * c + second * sine);
            head[j + half] = static_cast<float>(second * c - first * sine);
          }
        }
      }
    }
  }

  void AttentionGradient(Tensor q, const KvView& kv, float scale, Tensor dout, Tensor dq, Tensor dk,
                         Tensor dv) override {
    const int64_t dim = kv.layout.head_dim, group = q.cols / dim / kv.layout.kv_heads;
    for (const SequenceSpan& s : kv.sequences) {
      TREADLE_CHECK(s.first_position == 0 && kv.slopes == nullptr && kv.sinks == nullptr);
      for (int64_t head = 0; head < q.cols / dim; ++head) {
        for (int64_t i = 0; i < s.num_rows; ++i) {
          Row(q, kv, scale, dout, dq, dk, dv, s, head, head / group, i);
        }
      }
    }
  }

  double CrossEntropy(Tensor logits, std::span<const int32_t> targets, float scale) override {
    double loss = 0;
    for (int64_t i = 0; i < logits.rows; ++i) {
      float* row = logits.Row<float>(i);
      const double top = *std::max_element(row, row + logits.cols);
      double sum = 0;
      for (int64_t k = 0; k < logits.cols; ++k) sum += std::exp(row[k] - top);
      loss += std::log(sum) + top - row[targets[i]];
      for (int64_t k = 0; k < logits.cols; ++k) {
        const double p = std::exp(row[k] - top) / sum;
        row[k] = static_cast<float>(scale * (p - (k == targets[i] ? 1 : 0)));
      }
    }
    return loss;
  }

 private:
  // One row's part: p = softmax(scale * q k), dp = dout v, dscore = p * (dp - sum of p * dp).
  static void Row(const Tensor& q, const KvView& kv, double scale, const Tensor& dout,
                  const Tensor& dq, const Tensor& dk, const Tensor& dv, const SequenceSpan& s,
                  int64_t head, int64_t kv_head, int64_t i) {
    const int64_t dim = kv.layout.head_dim, page_size = kv.layout.page_size;
    const auto element = [&](int64_t position, int64_t k, bool value) {
      const auto* page = reinterpret_cast<const float*>(kv.pages + s.pages[position / page_size] *
                                                                       kv.layout.PageStride());
      const int64_t slot = position % page_size;
      return double{page[value ? kv.layout.ValueElement(kv_head, slot, k)
                               : kv.layout.KeyElement(kv_head, slot, k)]};
    };
    const int64_t first = kv.FirstSeen(i);
    const float* query = q.Row<float>(s.first_row + i) + head * dim;
    const float* d = dout.Row<float>(s.first_row + i) + head * dim;
    std::vector<double> p, dp;
    for (int64_t j = first; j <= i; ++j) {
      p.push_back(0);
      dp.push_back(0);
      for (int64_t k = 0; k < dim; ++k) {
        p.back() += scale * query[k] * element(j, k, false);
        dp.back() += d[k] * element(j, k, true);
      }
    }
    const double top = *std::ranges::max_element(p);
    double sum = 0, mean = 0;
    for (double& x : p) sum += x = std::exp(x - top);
    for (size_t j = 0; j < p.size(); ++j) mean += (p[j] /= sum) * dp[j];
    for (int64_t j = first; j <= i; ++j) {
      const double dscore = p[j - first] * (dp[j - first] - mean) * scale;
      for (int64_t k = 0; k < dim; ++k) {
        Add(dq.Row<float>(s.first_row + i)[head * dim + k], dscore * element(j, k, false));
        Add(dk.Row<float>(s.first_row + j)[kv_head * dim + k], dscore * query[k]);
        Add(dv.Row<float>(s.first_row + j)[kv_head * dim + k], p[j - first] * d[k]);
      }
    }
  }

  Backend& backend_;
};

}  // namespace

std::unique_ptr<GradientOps> CreateReferenceGradients(Backend& backend) {
  return std::make_unique<ReferenceGradients>(backend);
}

}  // namespace treadle
