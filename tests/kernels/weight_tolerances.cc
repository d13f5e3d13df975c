// Embed and MatMul.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/reference/reference_backend.h"
#include "tests/kernels/op_tolerances.h"

namespace treadle {
namespace {

// The values of row n, in canonical decoding. [k]
std::vector<float> Values(const PackedCase& weight, int64_t n) {
  const MatrixSource& source = weight.matrix.source;
  std::vector<float> values(static_cast<size_t>(source.k));
  DecodeSourceRow(source, source.SourceRow(n), values.data());
  return values;
}

// |scale * code| + |offset| of row n: what a product may sum separately. [k]
std::vector<double> Magnitudes(const PackedCase& weight, int64_t n) {
  const MatrixSource& source = weight.matrix.source;
  const WeightFormat& format = *source.format;
  const int64_t row = source.SourceRow(n);
  std::vector<double> magnitudes;
  if (format.group == 0) {
    for (const float value : Values(weight, n)) magnitudes.push_back(std::fabs(value));
    if (source.constants == nullptr || source.constants->zeros.empty()) return magnitudes;
    // scale * (code - zero): |scale| (|code| + |zero|) is at most this.
    const MatrixConstants& constants = *source.constants;
    for (int64_t i = 0; i < source.k; ++i) {
      const int64_t block = (row * source.k + i) / constants.scale_block;
      magnitudes[i] += 2 * std::fabs(double{constants.scales[block]} * constants.zeros[block]);
    }
    return magnitudes;
  }
  CodeGroup group;
  for (int64_t g = 0; g < source.k / format.group; ++g) {
    format.codes(source.data + row * format.RowBytes(source.k), g, group);
    for (int64_t i = 0; i < format.group; ++i) {
      magnitudes.push_back(std::fabs(double{group.scale} * group.codes[i]) +
                           std::fabs(group.offset));
    }
  }
  return magnitudes;
}

// Whether a float format's weights lie on the device rounded to another type than their own.
bool StoredRounded(const OpCase& c, const Arithmetic& arithmetic) {
  const bool is_float = c.format->group == 0 && !c.format->apart();
  return is_float && arithmetic.products != DType::kF32 &&
         c.format->name != Name(arithmetic.products);
}

// By how much a backend's 16-bit mode may round each weight of row n: half a step of 3584 (FP8) or
// more to the largest value of a codebook (kernels/cpu/cpu_backend.h). [k]
std::vector<double> CodebookSteps(const PackedCase& weight, int64_t n) {
  const MatrixSource& source = weight.matrix.source;
  const MatrixConstants& constants = *source.constants;
  double largest = 0;
  for (const float value : CodebookOf(source)) largest = std::fmax(largest, std::fabs(value));
  std::vector<double> steps;
  for (int64_t i = 0; i < source.k; ++i) {
    const int64_t block = (source.SourceRow(n) * source.k + i) / constants.scale_block;
    steps.push_back(std::fabs(constants.scales[block]) * largest / 7168);
  }
  return steps;
}

class MatMulTolerances {
 public:
  explicit MatMulTolerances(const OpRun& run)
      : run_(run), case_(run.op_case()), x_(run.tensor("x")) {
    for (const GuardedTensor& tensor : run.tensors) {
      if (tensor.name().starts_with("out")) outs_.push_back(&tensor);
      if (tensor.name().starts_with("bias")) biases_.push_back(&tensor);
    }
  }

  std::vector<float> Tolerance(const Arithmetic& arithmetic) const {
    ComputeMode compute = arithmetic.compute;
    const DType products = RowInt8() ? DType::kF32 : arithmetic.products;
    const bool rounds_codebook =
        compute == ComputeMode::kInt16 && case_.format->apart() && !RowInt8();
    if (case_.format->group == 0) compute = ComputeMode::kExact;
    std::vector<std::vector<double>> x;
    std::vector<double> units;
    for (int64_t row = 0; row < case_.rows; ++row) {
      x.push_back(Activations(row, compute));
      units.push_back(kFloatUnit * Roundings(row));
    }
    std::vector<float> tolerance;
    for (size_t i = 0; i < run_.weights.size(); ++i) {
      const size_t first = tolerance.size();
      const int64_t n_end = case_.outputs[i];
      const auto [begin, end] = case_.RowsOf(i);
      tolerance.resize(first + static_cast<size_t>((end - begin) * n_end));
      for (int64_t n = 0; n < n_end; ++n) {
        const std::vector<double> w = Magnitudes(run_.weights[i], n);
        const std::vector<float> values = Values(run_.weights[i], n);
        for (int64_t row = begin; row < end; ++row) {
          double sum = std::inner_product(w.begin(), w.end(), x[row].begin(), 0.0);
          if (case_.bias) sum += std::fabs(biases_[i]->Row(0)[n]);
          if (case_.accumulate) sum += std::fabs(outs_[i]->Row(row - begin)[n]);
          double limit = units[row] * sum;
          if (rounds_codebook) limit += CodebookRounding(row, w, CodebookSteps(run_.weights[i], n));
          if (products != DType::kF32) limit += FactorRounding(row, values, arithmetic);
          tolerance[first + (row - begin) * n_end + n] = static_cast<float>(limit);
        }
      }
    }
    return tolerance;
  }

 private:
  bool RowInt8() const { return case_.format->activations == ActivationPolicy::kRowInt8; }
  bool IsOutlier(float x) const {
    return case_.outlier_threshold > 0 && !(std::fabs(x) < case_.outlier_threshold);
  }

  // How many roundings separate a product from its definition, each of the sum of magnitudes.
  double Roundings(int64_t row) const {
    // k sequential sums walk like a random path; a few more for decoding, scales, bias, residual.
    if (!RowInt8()) return 8 + std::sqrt(static_cast<double>(case_.cols));
    // The integer sum is exact. It is rounded to float, as its scale, their product and the
    // reference's weights are; a rounded activation is at most twice the given one: 8. Bias,
    // residual and the results' own roundings: 4. Each outlier's product is added with one.
    double outliers = 0;
    for (int64_t i = 0; i < case_.cols; ++i) {
      for (int64_t r = 0; r < case_.rows; ++r) {
        if (r != row && case_.outlier_rule == OutlierRule::kPerRow) continue;
        if (IsOutlier(x_.Row(r)[i])) ++outliers;
      }
    }
    return 12 + outliers;
  }

  // What rounding both factors may change: activations by half a step of their block (16,256 to its
  // largest), weights by `steps`. The reference rounds neither.
  double CodebookRounding(int64_t row, std::span<const double> w,
                          std::span<const double> steps) const {
    const float* x = x_.Row(row);
    double sum = 0;
    for (int64_t begin = 0; begin < case_.cols; begin += 32) {
      const int64_t end = std::min(begin + 32, case_.cols);
      double absmax = 0;
      for (int64_t i = begin; i < end; ++i) absmax = std::fmax(absmax, std::fabs(x[i]));
      for (int64_t i = begin; i < end; ++i) {
        sum += (w[i] + steps[i]) * absmax / (2 * 16256) + std::fabs(x[i]) * steps[i];
      }
    }
    return 1.01 * sum;  // the steps' own roundings
  }

  // What rounding both factors of every product once may change: at most the sum of what it changes
  // in each, and surely no more than kSurely says of the independent ones.
  double FactorRounding(int64_t row, std::span<const float> values,
                        const Arithmetic& arithmetic) const {
    const DType type = arithmetic.products;
    const bool exact_weights = case_.format->name == Name(type);
    const float* x = x_.Row(row);
    double sum = 0;
    double squares = 0;
    double both = 0;
    for (int64_t i = 0; i < case_.cols; ++i) {
      const double size = std::fabs(x[i]);
      const double w = std::fabs(values[i]);
      const double x_error = size == 0 ? 0 : RoundingError(size, type);
      const double w_error = exact_weights || w == 0 ? 0 : RoundingError(w, type);
      sum += w * x_error + size * w_error;
      squares += std::pow(w * x_error, 2) + std::pow(size * w_error, 2);
      both += x_error * w_error;
    }
    return std::min(sum, kSurely * std::sqrt(squares)) + both;
  }

  std::vector<double> Activations(int64_t row, ComputeMode compute) const {
    const float* x = x_.Row(row);
    std::vector<double> out;
    for (int64_t i = 0; i < case_.cols; ++i) out.push_back(std::fabs(x[i]));
    if (!QuantizesActivations(compute)) return out;
    for (int64_t i = 0; i < case_.cols; i += 32) {
      const auto block = QuantizeActivations(std::span<const float, 32>(x + i, 32), compute);
      for (int j = 0; j < 32; ++j) out[i + j] = std::fabs(double{block.scale} * block.codes[j]);
    }
    return out;
  }

  const OpRun& run_;
  const OpCase& case_;
  const GuardedTensor& x_;
  std::vector<const GuardedTensor*> outs_, biases_;  // of each product
};

}  // namespace

// Canonical decode and one addition; but float weights may be stored rounded.
std::vector<float> EmbedTolerance(const OpRun& run, const Arithmetic& arithmetic) {
  const OpCase& c = run.op_case();
  std::vector<float> tolerance(static_cast<size_t>(c.rows * c.cols), 0.0f);
  if (!StoredRounded(c, arithmetic)) return tolerance;
  for (int64_t row = 0; row < c.rows; ++row) {
    const int32_t from = run.ids[row] - run.first_id;
    if (run.ids[row] < 0 || from < 0 || from >= c.outputs[0]) continue;
    const std::vector<double> w = Magnitudes(run.weights[0], from);
    for (int64_t i = 0; i < c.cols; ++i) {
      const double sum = c.accumulate ? w[i] + std::fabs(run.tensor("out").Row(row)[i]) : 0;
      tolerance[row * c.cols + i] =
          static_cast<float>(RoundingError(w[i], arithmetic.products) + 2 * kFloatUnit * sum);
    }
  }
  return tolerance;
}

std::vector<float> MatMulTolerance(const OpRun& run, const Arithmetic& arithmetic) {
  return MatMulTolerances(run).Tolerance(arithmetic);
}

}  // namespace treadle
