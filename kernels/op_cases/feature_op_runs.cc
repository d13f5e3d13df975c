// Norms, activations, Gather and Copy: each row of the output from rows of features.
#include <cmath>
#include <numeric>

#include "kernels/op_cases/guarded_tensor.h"
#include "kernels/op_cases/op_runs.h"
#include "kernels/op_cases/random.h"

namespace treadle::op_runs {
namespace {

std::span<const float> RowOf(const GuardedTensor& tensor, int64_t row) {
  return {tensor.Row(row), static_cast<size_t>(tensor.cols())};
}

class Norm final : public OpRun {
 public:
  Norm(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c),
        backend_(backend),
        x_(backend, c.rows, c.cols),
        out_(backend, c.rows, c.cols, OutputType(c, backend, c.cols)),
        weight_(backend, 1, c.cols),
        bias_(backend, 1, c.cols) {
    Random random(seed);
    // Real residuals have a few features that dwarf the rest.
    x_.Fill([&] { return random.Normal() * (random.Below(64) == 0 ? 30.0f : 1.0f); });
    weight_.Fill([&] { return random.Normal(); });
    bias_.Fill([&] { return random.Normal(); });
    weight_.Upload();
    bias_.Upload();
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    const Tensor x = x_.view().Rows(begin, count);
    const Tensor out = InPlace() ? x : out_.view().Rows(begin, count);
    const float* weight = weight_.view().Row<float>(0);
    if (case_.op == Op::kRmsNorm) {
      backend_.RmsNorm(x, weight, kEps, out);
    } else {
      backend_.LayerNorm(x, weight, case_.bias ? bias_.view().Row<float>(0) : nullptr, kEps, out);
    }
  }
  void Reset() override {
    x_.Upload();
    out_.Upload();
  }
  std::vector<float> Output() const override {
    std::vector<float> out;
    (InPlace() ? x_ : out_).Append(out);
    return out;
  }
  // Sums of up to cols terms in 16 parts, and a few roundings of the factors.
  std::vector<float> Tolerance(const Arithmetic&) const override {
    const double unit = kFloatUnit * (8 + std::sqrt(static_cast<double>(case_.cols)) / 4);
    std::vector<float> tolerance;
    for (int64_t row = 0; row < case_.rows; ++row) {
      const auto x = RowOf(x_, row);
      double squares = 0;
      double sum = 0;
      for (float value : x) {
        squares += double{value} * value;
        sum += value;
      }
      const double n = static_cast<double>(case_.cols);
      const bool layer = case_.op == Op::kLayerNorm;
      const double mean = layer ? sum / n : 0;
      const double scale = 1 / std::sqrt(squares / n - mean * mean + kEps);
      for (int64_t i = 0; i < case_.cols; ++i) {
        const double moved = std::fabs(x[i]) + (layer ? std::sqrt(squares / n) : 0);
        const double shift = layer && case_.bias ? std::fabs(bias_.Row(0)[i]) : 0;
        tolerance.push_back(
            static_cast<float>(unit * (moved * scale * std::fabs(weight_.Row(0)[i]) + shift)));
      }
    }
    return tolerance;
  }
  absl::Status CheckGuards() const override {
    TREADLE_RETURN_IF_ERROR(x_.CheckGuards("x", !InPlace()));
    TREADLE_RETURN_IF_ERROR(weight_.CheckGuards("weight", true));
    return out_.CheckGuards("out", false);
  }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override {
    const size_t element = sizeof(float) + SizeOf(out_.dtype());
    return static_cast<double>(element) * static_cast<double>(case_.rows * case_.cols);
  }
  double operations() const override { return 4.0 * static_cast<double>(case_.rows * case_.cols); }

 private:
  bool InPlace() const { return case_.in_place && out_.dtype() == DType::kF32; }
  static constexpr float kEps = 1e-5f;
  const OpCase case_;
  Backend& backend_;
  GuardedTensor x_, out_, weight_, bias_;
};

class Activation final : public OpRun {
 public:
  Activation(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c),
        backend_(backend),
        x_(backend, c.rows, c.cols),
        up_(backend, c.rows, c.cols),
        out_(backend, c.rows, c.cols, OutputType(c, backend, c.cols)) {
    Random random(seed);
    constexpr float kEdges[] = {0.0f, -0.0f, 88.0f, -88.0f, 104.0f, -104.0f, 1e5f, -1e5f, 1e-30f};
    x_.Fill([&] {
      return random.Below(16) == 0 ? kEdges[random.Below(std::size(kEdges))] : 3 * random.Normal();
    });
    up_.Fill([&] { return random.Normal(); });
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    const Tensor x = x_.view().Rows(begin, count);
    const Tensor out = InPlace() ? x : out_.view().Rows(begin, count);
    if (case_.op == Op::kGelu) {
      backend_.Gelu(x, out);
    } else {
      backend_.SwiGlu(x, up_.view().Rows(begin, count), out);
    }
  }
  void Reset() override {
    x_.Upload();
    up_.Upload();
    out_.Upload();
  }
  std::vector<float> Output() const override {
    std::vector<float> out;
    (InPlace() ? x_ : out_).Append(out);
    return out;
  }
  // SwiGLU: a dozen roundings of the value itself, of which exp brings its argument's. GeLU: 1 +
  // tanh cancels for negative x, so the unit is x.
  std::vector<float> Tolerance(const Arithmetic&) const override {
    std::vector<float> tolerance;
    for (int64_t row = 0; row < case_.rows; ++row) {
      for (int64_t i = 0; i < case_.cols; ++i) {
        const double x = x_.Row(row)[i];
        const double silu = x / (1 + std::exp(-x)) * up_.Row(row)[i];
        const double unit = case_.op == Op::kGelu ? 6 * std::fabs(x) : 12 * std::fabs(silu);
        tolerance.push_back(static_cast<float>(kFloatUnit * unit + 0x1p-126));
      }
    }
    return tolerance;
  }
  absl::Status CheckGuards() const override {
    TREADLE_RETURN_IF_ERROR(x_.CheckGuards("x", !InPlace()));
    TREADLE_RETURN_IF_ERROR(up_.CheckGuards("up", true));
    return out_.CheckGuards("out", false);
  }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override {
    const size_t inputs = case_.op == Op::kGelu ? 1 : 2;
    const size_t element = inputs * sizeof(float) + SizeOf(out_.dtype());
    return static_cast<double>(element) * static_cast<double>(case_.rows * case_.cols);
  }
  double operations() const override { return 8.0 * static_cast<double>(case_.rows * case_.cols); }

 private:
  bool InPlace() const { return case_.in_place && out_.dtype() == DType::kF32; }
  const OpCase case_;
  Backend& backend_;
  GuardedTensor x_, up_, out_;
};

// Serves Copy too.
class Gather final : public OpRun {
 public:
  Gather(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c),
        backend_(backend),
        x_(backend, 2 * c.rows + 1, c.cols),
        out_(backend, c.rows, c.cols) {
    Random random(seed);
    x_.Fill([&] { return random.Normal(); });
    for (int64_t i = 0; i < c.rows; ++i) {
      indices_.push_back(static_cast<int32_t>(random.Below(x_.rows())));
    }
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    const Tensor out = out_.view().Rows(begin, count);
    if (case_.op == Op::kCopy) return backend_.Copy(x_.view().Rows(begin, count), out);
    backend_.Gather(x_.view(), std::span(indices_).subspan(begin, count), out);
  }
  void Reset() override {
    x_.Upload();
    out_.Upload();
  }
  std::vector<float> Output() const override {
    std::vector<float> out;
    out_.Append(out);
    return out;
  }
  std::vector<float> Tolerance(const Arithmetic&) const override {
    return std::vector<float>(static_cast<size_t>(case_.rows * case_.cols), 0.0f);
  }
  absl::Status CheckGuards() const override {
    TREADLE_RETURN_IF_ERROR(x_.CheckGuards("x", true));
    return out_.CheckGuards("out", false);
  }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override { return 8.0 * static_cast<double>(case_.rows * case_.cols); }
  double operations() const override { return 0; }

 private:
  const OpCase case_;
  Backend& backend_;
  GuardedTensor x_, out_;
  std::vector<int32_t> indices_;
};

}  // namespace

std::unique_ptr<OpRun> MakeNorm(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<Norm>(op_case, backend, seed);
}
std::unique_ptr<OpRun> MakeActivation(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<Activation>(op_case, backend, seed);
}
std::unique_ptr<OpRun> MakeGather(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<Gather>(op_case, backend, seed);
}

}  // namespace treadle::op_runs
