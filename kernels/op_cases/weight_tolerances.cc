// Embed and MatMul.
#include <cmath>
#include <numeric>

#include "kernels/op_cases/tolerant_reference.h"
#include "kernels/reference/reference_backend.h"

namespace treadle {
namespace {

// A weight of the reference's, with a copy of what it was made from.
class KeptMatrix final : public PackedMatrix {
 public:
  KeptMatrix(const MatrixSource& source, std::unique_ptr<PackedMatrix> packed)
      : packed_(std::move(packed)),
        data_(source.data, source.data + source.format->MatrixBytes(source.n, source.k)),
        row_order_(source.row_order.begin(), source.row_order.end()),
        source_(source),
        integers_(HasIntegers(source)) {
    source_.data = data_.data();
    source_.row_order = row_order_;
    source_.file = nullptr;
    if (source.constants == nullptr) return;
    constants_ = *source.constants;
    constants_.codes = {};  // data_
    source_.constants = &constants_;
  }
  int64_t n() const override { return packed_->n(); }
  int64_t k() const override { return packed_->k(); }
  const WeightFormat& format() const override { return packed_->format(); }
  size_t bytes() const override { return packed_->bytes(); }

  const PackedMatrix& packed() const { return *packed_; }

  bool row_int8() const { return format().activations == ActivationPolicy::kRowInt8; }
  // Whether a float format's weights lie on the device rounded to another type than their own.
  bool StoredRounded(const Arithmetic& arithmetic) const {
    return format().group == 0 && !format().apart() && arithmetic.products != DType::kF32 &&
           format().name != Name(arithmetic.products);
  }
  bool IsOutlier(float x) const {
    const float threshold = constants_.outlier_threshold;
    return threshold > 0 && !(std::fabs(x) < threshold);
  }
  const MatrixSource& source() const { return source_; }
  bool integers() const { return integers_; }
  OutlierRule outlier_rule() const { return constants_.outlier_rule; }

  // The values of row n, in canonical decoding. [k]
  std::vector<float> Values(int64_t n) const {
    std::vector<float> values(static_cast<size_t>(k()));
    DecodeSourceRow(source_, source_.SourceRow(n), values.data());
    return values;
  }
  // |scale * code| + |offset| of row n: what a product may sum separately. [k]
  std::vector<double> Magnitudes(int64_t n) const;
  // By how much a backend's 16-bit mode may round each weight of row n: half a step of 3584 (FP8)
  // or more to the largest value of a codebook (kernels/cpu/cpu_backend.h). [k]
  std::vector<double> CodebookSteps(int64_t n) const;

 private:
  // The index of the block of constants that element i of row n has.
  size_t BlockOf(int64_t n, int64_t i) const {
    return static_cast<size_t>((source_.SourceRow(n) * k() + i) / constants_.scale_block);
  }

  const std::unique_ptr<PackedMatrix> packed_;
  const std::vector<std::byte> data_;
  const std::vector<int32_t> row_order_;
  MatrixConstants constants_;
  MatrixSource source_;
  const bool integers_;
};

std::vector<double> KeptMatrix::Magnitudes(int64_t n) const {
  std::vector<double> magnitudes;
  const WeightFormat& format = *source_.format;
  if (format.group == 0) {
    for (const float value : Values(n)) magnitudes.push_back(std::fabs(value));
    if (constants_.zeros.empty() && !integers()) return magnitudes;
    // scale * (code - zero): |scale| (|code| + |zero|) is at most this.
    for (int64_t i = 0; i < k(); ++i) {
      const size_t block = BlockOf(n, i);
      const float zero = integers() ? ZeroCode(source_, block) : constants_.zeros[block];
      magnitudes[i] += 2 * std::fabs(double{constants_.scales[block]} * zero);
    }
    return magnitudes;
  }
  CodeGroup group;
  const std::byte* const row = source_.data + source_.SourceRow(n) * format.RowBytes(k());
  for (int64_t g = 0; g < k() / format.group; ++g) {
    format.codes(row, g, group);
    for (int64_t i = 0; i < format.group; ++i) {
      magnitudes.push_back(std::fabs(double{group.scale} * group.codes[i]) +
                           std::fabs(group.offset));
    }
  }
  return magnitudes;
}

std::vector<double> KeptMatrix::CodebookSteps(int64_t n) const {
  double largest = 0;
  for (const float value : CodebookOf(source_)) largest = std::fmax(largest, std::fabs(value));
  std::vector<double> steps;
  for (int64_t i = 0; i < k(); ++i) {
    steps.push_back(std::fabs(constants_.scales[BlockOf(n, i)]) * largest / 7168);
  }
  return steps;
}

const KeptMatrix& Kept(const PackedMatrix& matrix) {
  return static_cast<const KeptMatrix&>(matrix);
}

// One projection of x [rows, k], of which it may read a part.
class ProductError {
 public:
  ProductError(Tensor x, const Projection& projection, const Arithmetic& arithmetic)
      : x_(x),
        projection_(projection),
        weight_(Kept(*projection.weight)),
        compute_(ModeOf(arithmetic.compute, weight_.source())),
        products_(weight_.row_int8() ? DType::kF32 : arithmetic.products),
        rounds_codebook_(compute_ == ComputeMode::kInt16 && weight_.format().apart() &&
                         !weight_.row_int8() && !weight_.integers()) {}

  // [out.rows, n]
  void Fill(float* error) const {
    const Tensor& out = projection_.out;
    std::vector<std::vector<double>> x;
    std::vector<double> units;
    for (int64_t row = 0; row < out.rows; ++row) {
      x.push_back(Activations(projection_.first_row + row));
      units.push_back(kFloatUnit * Roundings(projection_.first_row + row));
    }
    for (int64_t n = 0; n < out.cols; ++n) {
      const std::vector<double> w = weight_.Magnitudes(n);
      const std::vector<float> values =
          products_ == DType::kF32 ? std::vector<float>() : weight_.Values(n);
      const std::vector<double> steps =
          rounds_codebook_ ? weight_.CodebookSteps(n) : std::vector<double>();
      for (int64_t row = 0; row < out.rows; ++row) {
        double sum = std::inner_product(w.begin(), w.end(), x[row].begin(), 0.0);
        if (projection_.bias != nullptr) sum += std::fabs(projection_.bias[n]);
        if (projection_.accumulate) sum += std::fabs(out.Row<float>(row)[n]);
        double limit = units[row] * sum;
        const int64_t from = projection_.first_row + row;
        if (rounds_codebook_) limit += CodebookRounding(from, w, steps);
        if (products_ != DType::kF32) limit += FactorRounding(from, values);
        error[row * out.cols + n] = static_cast<float>(limit);
      }
    }
  }

 private:
  // How many roundings separate a product from its definition, each of the sum of magnitudes.
  double Roundings(int64_t row) const {
    // k sequential sums walk like a random path; a few more for decoding, scales, bias, residual.
    if (!weight_.row_int8()) return 8 + std::sqrt(static_cast<double>(x_.cols));
    // The integer sum is exact. It is rounded to float, as its scale, their product and the
    // reference's weights are; a rounded activation is at most twice the given one: 8. Bias,
    // residual and the results' own roundings: 4. Each outlier's product is added with one.
    double outliers = 0;
    for (int64_t r = 0; r < x_.rows; ++r) {
      if (r != row && weight_.outlier_rule() == OutlierRule::kPerRow) continue;
      for (int64_t i = 0; i < x_.cols; ++i) {
        if (weight_.IsOutlier(x_.Row<float>(r)[i])) ++outliers;
      }
    }
    return 12 + outliers;
  }

  // The change by rounding both factors: activations by half a step of their span (16,256 to its
  // largest), weights by `steps`. The reference rounds neither.
  double CodebookRounding(int64_t row, std::span<const double> w,
                          std::span<const double> steps) const {
    const float* x = x_.Row<float>(row);
    double sum = 0;
    for (int64_t begin = 0, end; begin < x_.cols; begin = end) {
      end = begin + ActivationSpan(x_.cols - begin);
      double absmax = 0;
      for (int64_t i = begin; i < end; ++i) absmax = std::fmax(absmax, std::fabs(x[i]));
      for (int64_t i = begin; i < end; ++i) {
        sum += (w[i] + steps[i]) * absmax / (2 * 16256) + std::fabs(x[i]) * steps[i];
      }
    }
    return 1.01 * sum;  // the steps' own roundings
  }

  // The change by rounding both factors of every product once: at most the sum of what it changes
  // in each, and surely no more than kSurely says of the independent ones.
  double FactorRounding(int64_t row, std::span<const float> values) const {
    const bool exact_weights = weight_.format().name == Name(products_);
    const float* x = x_.Row<float>(row);
    double sum = 0;
    double squares = 0;
    double both = 0;
    for (int64_t i = 0; i < x_.cols; ++i) {
      const double size = std::fabs(x[i]);
      const double w = std::fabs(values[i]);
      const double x_error = size == 0 ? 0 : RoundingError(size, products_);
      const double w_error = exact_weights || w == 0 ? 0 : RoundingError(w, products_);
      sum += w * x_error + size * w_error;
      squares += std::pow(w * x_error, 2) + std::pow(size * w_error, 2);
      both += x_error * w_error;
    }
    return std::min(sum, kSurely * std::sqrt(squares)) + both;
  }

  // Their magnitudes as the product sees them.
  std::vector<double> Activations(int64_t row) const {
    const float* x = x_.Row<float>(row);
    std::vector<double> out(x, x + x_.cols);
    if (QuantizesActivations(compute_) && weight_.integers()) {
      out = RoundedActivations({x, static_cast<size_t>(x_.cols)}, compute_,
                               InputOrderOf(weight_.source()));
    }
    for (double& value : out) value = std::fabs(value);
    return out;
  }

  const Tensor x_;
  const Projection& projection_;
  const KeptMatrix& weight_;
  const ComputeMode compute_;
  const DType products_;  // the type that its factors are rounded to
  const bool rounds_codebook_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> TolerantReference::Pack(const MatrixSource& source) {
  TREADLE_ASSIGN_OR_RETURN(auto packed, ForwardingBackend::Pack(source));
  return std::make_unique<KeptMatrix>(source, std::move(packed));
}

// Canonical decode and one addition; but float weights may be stored rounded.
void TolerantReference::Embed(const PackedMatrix& table, std::span<const int32_t> ids,
                              int32_t first_id, bool accumulate, Tensor out) {
  Begin();
  float* const errors = Writes(out);
  const KeptMatrix& kept = Kept(table);
  for (int64_t row = 0; row < out.rows && kept.StoredRounded(arithmetic_); ++row) {
    const int32_t from = ids[row] - first_id;
    if (ids[row] < 0 || from < 0 || from >= table.n()) continue;
    const std::vector<double> w = kept.Magnitudes(from);
    for (int64_t i = 0; i < out.cols; ++i) {
      const double sum = accumulate ? w[i] + std::fabs(out.Row<float>(row)[i]) : 0;
      errors[row * out.cols + i] =
          static_cast<float>(RoundingError(w[i], arithmetic_.products) + 2 * kFloatUnit * sum);
    }
  }
  below().Embed(kept.packed(), ids, first_id, accumulate, out);
}

void TolerantReference::MatMul(Tensor x, std::span<const Projection> projections) {
  Begin();
  std::vector<Projection> packed(projections.begin(), projections.end());
  for (size_t i = 0; i < packed.size(); ++i) {
    const auto part = packed.size() == 1 ? std::string() : Str("projection ", i);
    ProductError(x, projections[i], arithmetic_).Fill(Writes(packed[i].out, part));
    packed[i].weight = &Kept(*projections[i].weight).packed();
  }
  below().MatMul(x, packed);
}

}  // namespace treadle
