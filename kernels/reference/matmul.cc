// Matrices kept as decoded floats, products summed in double.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/formats/normal_bf16.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {

std::vector<double> RoundedActivations(std::span<const float> x, ComputeMode compute,
                                       std::span<const int32_t> order) {
  TREADLE_CHECK(QuantizesActivations(compute));
  if (!order.empty()) {
    std::vector<float> ordered;
    for (const int32_t from : order) ordered.push_back(x[from]);
    const std::vector<double> rounded = RoundedActivations(ordered, compute);
    std::vector<double> in_place(x.size());
    for (size_t i = 0; i < order.size(); ++i) in_place[order[i]] = rounded[i];
    return in_place;
  }
  const float steps = compute == ComputeMode::kInt8    ? 127.0f
                      : compute == ComputeMode::kInt12 ? 2032.0f
                                                       : 16256.0f;
  std::vector<double> rounded;
  while (!x.empty()) {
    const auto left = static_cast<int64_t>(x.size());
    const auto span =
        static_cast<size_t>(compute == ComputeMode::kInt8 ? 32 : ActivationSpan(left));
    float absmax = 0;
    for (const float value : x.first(span)) absmax = std::fmax(absmax, std::fabs(value));
    const bool zero = absmax < 0x1p-100f;
    const float scale = absmax / steps, inverse = steps / absmax;
    for (const float value : x.first(span)) {
      rounded.push_back(zero ? 0.0 : double{scale} * std::nearbyint(value * inverse));
    }
    x = x.subspan(span);
  }
  return rounded;
}

namespace {

class FloatMatrix final : public PackedMatrix {
 public:
  FloatMatrix(const MatrixSource& source, ComputeMode compute)
      : format_(*source.format),
        n_(source.n),
        k_(source.k),
        mode_(ModeOf(compute, source)),
        integers_(HasIntegers(source)),
        input_order_(InputOrderOf(source).begin(), InputOrderOf(source).end()),
        values_(static_cast<size_t>(n_ * k_)) {
    if (source.constants == nullptr) return;
    outlier_threshold_ = source.constants->outlier_threshold;
    outlier_rule_ = source.constants->outlier_rule;
  }
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  const WeightFormat& format() const override { return format_; }
  size_t bytes() const override { return values_.size() * sizeof(float); }
  float* Row(int64_t row) { return values_.data() + row * k_; }
  const float* Row(int64_t row) const { return values_.data() + row * k_; }
  ComputeMode mode() const { return mode_; }  // of its products
  bool integers() const { return integers_; }
  std::span<const int32_t> input_order() const { return input_order_; }
  float outlier_threshold() const { return outlier_threshold_; }
  OutlierRule outlier_rule() const { return outlier_rule_; }

 private:
  const WeightFormat& format_;
  const int64_t n_;
  const int64_t k_;
  const ComputeMode mode_;
  const bool integers_;
  const std::vector<int32_t> input_order_;
  std::vector<float> values_;  // [n, k]
  float outlier_threshold_ = 0;
  OutlierRule outlier_rule_ = OutlierRule::kPerRow;
};

double ToBf16(float x) { return ToFloat(ToNormalBFloat16(x)); }

bool IsOutlier(float x, float threshold) { return threshold > 0 && !(std::fabs(x) < threshold); }

// LLM.int8(): row `row` of x with everything but the outliers rounded to 127 steps.
std::vector<double> RowInt8Activations(const Tensor& x, int64_t row, float threshold,
                                       OutlierRule rule) {
  const float* const values = x.Row<float>(row);
  std::vector<double> rounded(values, values + x.cols);
  std::vector<bool> outlier(static_cast<size_t>(x.cols));
  float absmax = 0;
  for (int64_t k = 0; k < x.cols; ++k) {
    const bool call = rule == OutlierRule::kPerCall;
    for (int64_t r = call ? 0 : row; r < (call ? x.rows : row + 1); ++r) {
      if (IsOutlier(x.Row<float>(r)[k], threshold)) outlier[k] = true;
    }
    if (!outlier[k]) absmax = std::fmax(absmax, std::fabs(values[k]));
  }
  const bool zero = absmax < 0x1p-100f;
  const float scale = absmax / 127.0f;
  const float inverse = 127.0f / absmax;
  for (int64_t k = 0; k < x.cols; ++k) {
    if (outlier[k]) continue;
    rounded[k] = zero ? 0.0 : double{scale} * std::nearbyint(values[k] * inverse);
  }
  return rounded;
}

std::span<const float> WeightRow(const PackedMatrix& matrix, int64_t row) {  // [k]
  TREADLE_CHECK(row >= 0 && row < matrix.n());
  return {static_cast<const FloatMatrix&>(matrix).Row(row), static_cast<size_t>(matrix.k())};
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> ReferenceBackend::Pack(const MatrixSource& source) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  auto matrix = std::make_unique<FloatMatrix>(source, compute_);
  for (int64_t row = 0; row < source.n; ++row) {
    DecodeSourceRow(source, source.SourceRow(row), matrix->Row(row));
  }
  return matrix;
}

void ReferenceBackend::Embed(const PackedMatrix& table, std::span<const int32_t> ids,
                             int32_t first_id, bool accumulate, Tensor out) {
  TREADLE_CHECK(out.cols == table.k() && out.rows == static_cast<int64_t>(ids.size()));
  for (int64_t row = 0; row < out.rows; ++row) {
    float* to = out.Row<float>(row);
    const int64_t from = TableRow(table, ids[row], first_id);
    if (from < 0) {
      if (!accumulate) std::fill_n(to, out.cols, 0.0f);
      continue;
    }
    const auto weights = WeightRow(table, from);
    for (int64_t i = 0; i < out.cols; ++i) to[i] = accumulate ? to[i] + weights[i] : weights[i];
  }
}

void ReferenceBackend::MatMul(Tensor x, std::span<const Projection> projections) {
  for (int64_t row = 0; row < x.rows; ++row) {
    for (const Projection& projection : projections) {
      const auto& weight = static_cast<const FloatMatrix&>(*projection.weight);
      TREADLE_CHECK(weight.k() == x.cols && weight.n() == projection.out.cols);
      const Tensor rows = x.Rows(projection.first_row, projection.out.rows);
      if (row < projection.first_row || row >= projection.first_row + rows.rows) continue;
      const bool blocks = weight.integers() && x.cols % 32 == 0;
      const std::span<const float> given(x.Row<float>(row), static_cast<size_t>(x.cols));
      std::vector<double> values(given.begin(), given.end());
      if (blocks && QuantizesActivations(weight.mode())) {
        values = RoundedActivations(given, weight.mode(), weight.input_order());
      }
      const bool row_int8 = weight.format().activations == ActivationPolicy::kRowInt8;
      const bool rounds = weight.mode() == ComputeMode::kBf16 && !row_int8;
      if (rounds) std::ranges::transform(values, values.begin(), ToBf16);
      if (row_int8) {
        values = RowInt8Activations(rows, row - projection.first_row, weight.outlier_threshold(),
                                    weight.outlier_rule());
      }
      float* out = projection.out.Row<float>(row - projection.first_row);
      for (int64_t n = 0; n < weight.n(); ++n) {
        const auto w = WeightRow(weight, n);
        double sum = 0;
        for (int64_t k = 0; k < x.cols; ++k) sum += (rounds ? ToBf16(w[k]) : w[k]) * values[k];
        if (projection.bias != nullptr) sum += projection.bias[n];
        if (projection.accumulate) sum += out[n];
        out[n] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace treadle
