#include "bench/quality/int8_simulation.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/forwarding_backend.h"

namespace treadle {
namespace {

constexpr float kSteps = 127;  // to each side of zero

constexpr Int8Variant kVariants[] = {
    {.name = "int8 absmax"},
    {.name = "int8 zeropoint", .zero_point = true},
    {.name = "int8 absmax row-wise", .activation_rows = true},
    {.name = "int8 absmax vector-wise", .activation_rows = true, .weight_rows = true},
    {.name = "int8 zeropoint vector-wise",
     .zero_point = true,
     .activation_rows = true,
     .weight_rows = true},
    {.name = "int8 absmax row-wise + decomposition", .activation_rows = true, .decomposed = true},
    {.name = "absmax LLM.int8() (vector-wise + decomposition)",
     .activation_rows = true,
     .weight_rows = true,
     .decomposed = true},
    {.name = "zeropoint LLM.int8() (vector-wise + decomposition)",
     .zero_point = true,
     .activation_rows = true,
     .weight_rows = true,
     .decomposed = true},
    {.name = "absmax LLM.int8(), 8-bit weights of outlier columns too",
     .activation_rows = true,
     .weight_rows = true,
     .decomposed = true,
     .outlier_weights_int8 = true},
};

void RoundGroup(bool zero_point, std::span<float> values) {
  const auto [least, greatest] = std::minmax_element(values.begin(), values.end());
  if (zero_point) {
    const float low = std::min(*least, 0.0f), high = std::max(*greatest, 0.0f);
    const float step = (high - low) / (2 * kSteps);
    if (step == 0) return;
    const float zero = std::nearbyint(-low / step);
    for (float& value : values) {
      value = (std::clamp(std::nearbyint(value / step) + zero, 0.0f, 2 * kSteps) - zero) * step;
    }
    return;
  }
  const float step = std::max(-*least, *greatest) / kSteps;
  if (step == 0) return;
  for (float& value : values) value = std::nearbyint(value / step) * step;
}

// The simulation of one matrix: all on the backend below, as 32-bit floats.
class SimulatedMatrix : public PackedMatrix {
 public:
  SimulatedMatrix(std::unique_ptr<PackedMatrix> rounded, std::unique_ptr<PackedMatrix> outliers,
                  bool touched)
      : rounded_(std::move(rounded)), outliers_(std::move(outliers)), touched_(touched) {}
  int64_t n() const override { return rounded_->n(); }
  int64_t k() const override { return rounded_->k(); }
  const WeightFormat& format() const override { return rounded_->format(); }
  size_t bytes() const override { return rounded_->bytes(); }

  const PackedMatrix* rounded() const { return rounded_.get(); }
  // Multiplies the outlier columns.
  const PackedMatrix* outliers() const { return outliers_ ? outliers_.get() : rounded_.get(); }
  bool touched() const { return touched_; }

 private:
  const std::unique_ptr<PackedMatrix> rounded_, outliers_;
  const bool touched_;
};

const SimulatedMatrix& Simulated(const PackedMatrix& matrix) {
  return static_cast<const SimulatedMatrix&>(matrix);
}

class SimulatedBackend : public ForwardingBackend {
 public:
  SimulatedBackend(std::unique_ptr<Backend> below, const Int8Variant& variant,
                   int64_t untouched_rows)
      : ForwardingBackend(std::move(below)),
        variant_(variant),
        untouched_rows_(untouched_rows),
        description_(Str("simulation of ", variant.name, " on ", this->below().description())) {}

  std::string_view name() const override { return "simulation"; }
  std::string description() const override { return description_; }
  absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) override;
  // MatMul reads floats.
  DType InputType(std::span<const PackedMatrix* const>) const override { return DType::kF32; }
  void Embed(const PackedMatrix& table, std::span<const int32_t> ids, int32_t first_id,
             bool accumulate, Tensor out) override {
    below().Embed(*Simulated(table).rounded(), ids, first_id, accumulate, out);
  }
  void MatMul(Tensor x, std::span<const Projection> projections) override;

 private:
  absl::StatusOr<std::unique_ptr<PackedMatrix>> PackFloats(const MatrixSource& shape,
                                                           std::span<const float> values) {
    MatrixSource source = {.format = FindWeightFormat("f32"), .n = shape.n, .k = shape.k};
    source.data = reinterpret_cast<const std::byte*>(values.data());
    return below().Pack(source);
  }

  const Int8Variant variant_;
  const int64_t untouched_rows_;
  const std::string description_;
};

absl::StatusOr<std::unique_ptr<PackedMatrix>> SimulatedBackend::Pack(const MatrixSource& source) {
  std::unique_ptr<PackedMatrix> rounded, outliers;
  const bool touched = source.n != untouched_rows_;
  if (!touched) {
    TREADLE_ASSIGN_OR_RETURN(rounded, below().Pack(source));
    return std::make_unique<SimulatedMatrix>(std::move(rounded), nullptr, false);
  }
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  std::vector<float> values(static_cast<size_t>(source.n * source.k));
  for (int64_t row = 0; row < source.n; ++row) {
    DecodeSourceRow(source, source.SourceRow(row), values.data() + row * source.k);
  }
  if (variant_.decomposed && !variant_.outlier_weights_int8) {
    TREADLE_ASSIGN_OR_RETURN(outliers, PackFloats(source, values));
  }
  RoundToInt8(variant_.zero_point, variant_.weight_rows, values, source.n, source.k);
  TREADLE_ASSIGN_OR_RETURN(rounded, PackFloats(source, values));
  return std::make_unique<SimulatedMatrix>(std::move(rounded), std::move(outliers), true);
}

void SimulatedBackend::MatMul(Tensor x, std::span<const Projection> projections) {
  std::vector<Projection> products(projections.begin(), projections.end());
  for (Projection& product : products) product.weight = Simulated(*product.weight).rounded();
  // Projections of one input are all of a layer, or the head alone.
  if (!Simulated(*projections[0].weight).touched()) return below().MatMul(x, products);

  const auto size = static_cast<size_t>(x.rows * x.cols);
  std::vector<float> inputs(size), outliers(size);
  for (int64_t row = 0; row < x.rows; ++row) {
    std::copy_n(x.Row<float>(row), x.cols, inputs.data() + row * x.cols);
  }
  bool any = false;
  for (int64_t col = 0; variant_.decomposed && col < x.cols; ++col) {
    bool outlier = false;
    for (int64_t row = 0; row < x.rows; ++row) {
      outlier |= std::abs(inputs[row * x.cols + col]) >= variant_.threshold;
    }
    if (!outlier) continue;
    any = true;
    for (int64_t row = 0; row < x.rows; ++row) {
      std::swap(inputs[row * x.cols + col], outliers[row * x.cols + col]);
    }
  }
  RoundToInt8(variant_.zero_point, variant_.activation_rows, inputs, x.rows, x.cols);
  below().MatMul(DenseTensor(inputs.data(), DType::kF32, x.rows, x.cols), products);
  if (!any) return;
  for (size_t i = 0; i < products.size(); ++i) {
    products[i].weight = Simulated(*projections[i].weight).outliers();
    products[i].bias = nullptr;
    products[i].accumulate = true;
  }
  below().MatMul(DenseTensor(outliers.data(), DType::kF32, x.rows, x.cols), products);
}

}  // namespace

std::span<const Int8Variant> Int8Variants() { return kVariants; }

void RoundToInt8(bool zero_point, bool per_row, std::span<float> values, int64_t rows,
                 int64_t cols) {
  if (!per_row) return RoundGroup(zero_point, values);
  for (int64_t row = 0; row < rows; ++row) {
    RoundGroup(zero_point, values.subspan(row * cols, cols));
  }
}

std::unique_ptr<Backend> SimulateInt8(std::unique_ptr<Backend> backend, const Int8Variant& variant,
                                      int64_t untouched_rows) {
  return std::make_unique<SimulatedBackend>(std::move(backend), variant, untouched_rows);
}

}  // namespace treadle
