// Embed and MatMul: ops on packed weights.
#include <algorithm>
#include <cmath>
#include <deque>
#include <numeric>

#include "kernels/op_cases/guarded_tensor.h"
#include "kernels/op_cases/op_runs.h"
#include "kernels/op_cases/random.h"
#include "kernels/reference/reference_backend.h"

namespace treadle::op_runs {
namespace {

// A random matrix as the case wants it stored, packed by the backend.
struct Weight {
  Weight(const OpCase& c, Backend& backend, int64_t n, uint64_t seed)
      : matrix(MakeRandomMatrix(*c.format, n, c.cols, seed, c.scale_block)) {
    matrix.source.transposed = c.transposed;
    if (matrix.constants != nullptr) {
      matrix.constants->outlier_threshold = c.outlier_threshold;
      matrix.constants->outlier_rule = c.outlier_rule;
    }
    if (c.row_order) {
      Random random(seed);
      matrix.row_order.resize(static_cast<size_t>(n));
      std::iota(matrix.row_order.begin(), matrix.row_order.end(), 0);
      for (int64_t i = n - 1; i > 0; --i) {
        std::swap(matrix.row_order[i], matrix.row_order[random.Below(i + 1)]);
      }
      matrix.source.row_order = matrix.row_order;
    }
    auto result = backend.Pack(matrix.source);
    TREADLE_CHECK(result.ok());
    packed = *std::move(result);
  }

  RandomMatrix matrix;
  std::unique_ptr<PackedMatrix> packed;
};

// The values of row n, in canonical decoding. [k]
std::vector<float> Values(const Weight& weight, int64_t n) {
  const MatrixSource& source = weight.matrix.source;
  std::vector<float> values(static_cast<size_t>(source.k));
  DecodeSourceRow(source, source.SourceRow(n), values.data());
  return values;
}

// |scale * code| + |offset| of row n: what a product may sum separately. [k]
std::vector<double> Magnitudes(const Weight& weight, int64_t n) {
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
std::vector<double> CodebookSteps(const Weight& weight, int64_t n) {
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

class Embed final : public OpRun {
 public:
  Embed(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c),
        backend_(backend),
        table_(c, backend, c.outputs[0], seed),
        out_(backend, c.rows, c.cols) {
    Random random(seed);
    // The table is all of a vocabulary, or a part of it.
    first_id_ = random.Below(2) == 0 ? 0 : 37;
    const auto n = static_cast<int32_t>(c.outputs[0]);
    const int32_t elsewhere[] = {-1, first_id_ - 1, first_id_ + n, first_id_ + n + 5};
    for (int64_t i = 0; i < c.rows; ++i) {
      ids_.push_back(random.Below(8) == 0 ? elsewhere[random.Below(4)]
                                          : first_id_ + static_cast<int32_t>(random.Below(n)));
    }
    if (c.accumulate) out_.Fill([&] { return random.Normal(); });
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    backend_.Embed(*table_.packed, std::span(ids_).subspan(begin, count), first_id_,
                   case_.accumulate, out_.view().Rows(begin, count));
  }
  void Reset() override { out_.Upload(); }
  std::vector<float> Output() const override {
    std::vector<float> out;
    out_.Append(out);
    return out;
  }
  // Canonical decode and one addition; but float weights may be stored rounded.
  std::vector<float> Tolerance(const Arithmetic& arithmetic) const override {
    std::vector<float> tolerance(static_cast<size_t>(case_.rows * case_.cols), 0.0f);
    if (!StoredRounded(case_, arithmetic)) return tolerance;
    for (int64_t row = 0; row < case_.rows; ++row) {
      const int32_t from = ids_[row] - first_id_;
      if (ids_[row] < 0 || from < 0 || from >= case_.outputs[0]) continue;
      const std::vector<double> w = Magnitudes(table_, from);
      for (int64_t i = 0; i < case_.cols; ++i) {
        const double sum = case_.accumulate ? w[i] + std::fabs(out_.Row(row)[i]) : 0;
        tolerance[row * case_.cols + i] =
            static_cast<float>(RoundingError(w[i], arithmetic.products) + 2 * kFloatUnit * sum);
      }
    }
    return tolerance;
  }
  absl::Status CheckGuards() const override { return out_.CheckGuards("out", false); }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override {
    const double row = static_cast<double>(table_.packed->bytes()) / case_.outputs[0];
    return static_cast<double>(case_.rows) * (row + 4.0 * case_.cols);
  }
  double operations() const override { return 2.0 * static_cast<double>(case_.rows * case_.cols); }

 private:
  const OpCase case_;
  Backend& backend_;
  const Weight table_;
  GuardedTensor out_;
  int32_t first_id_ = 0;
  std::vector<int32_t> ids_;
};

class MatMul final : public OpRun {
 public:
  MatMul(const OpCase& c, Backend& backend, uint64_t seed)
      : case_(c),
        backend_(backend),
        weights_(MakeWeights(c, backend, seed)),
        x_(backend, c.rows, c.cols, InputTypeOf(c, backend, weights_)) {
    Random random(seed);
    if (RowInt8()) {
      x_.Fill([&] { return random.Normal(); });  // within 3.5
      PlantOutliers(random);
    } else {
      x_.Fill([&] { return random.Normal() * (random.Below(100) == 0 ? 20.0f : 1.0f); });
    }
    if (c.rows > 1) std::fill_n(x_.Row(1), c.cols, 0.0f);  // a zero row has absmax 0
    for (int64_t n : c.outputs) {
      outs_.emplace_back(backend, c.rows, n);
      biases_.emplace_back(backend, 1, n);
      biases_.back().Fill([&] { return random.Normal(); });
      biases_.back().Upload();
      if (c.accumulate) outs_.back().Fill([&] { return random.Normal(); });
    }
    Reset();
  }

  void RunRows(int64_t begin, int64_t count) override {
    projections_.clear();
    for (size_t i = 0; i < weights_.size(); ++i) {
      projections_.push_back({.weight = weights_[i].packed.get(),
                              .bias = case_.bias ? biases_[i].view().Row<float>(0) : nullptr,
                              .out = outs_[i].view().Rows(begin, count),
                              .accumulate = case_.accumulate});
    }
    backend_.MatMul(x_.view().Rows(begin, count), projections_);
  }
  void Reset() override {
    x_.Upload();
    for (GuardedTensor& out : outs_) out.Upload();
  }
  std::vector<float> Output() const override {
    std::vector<float> out;
    for (const GuardedTensor& tensor : outs_) tensor.Append(out);
    return out;
  }
  std::vector<float> Tolerance(const Arithmetic& arithmetic) const override {
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
    for (size_t i = 0; i < weights_.size(); ++i) {
      const size_t first = tolerance.size();
      const int64_t n_end = case_.outputs[i];
      tolerance.resize(first + static_cast<size_t>(case_.rows * n_end));
      for (int64_t n = 0; n < n_end; ++n) {
        const std::vector<double> w = Magnitudes(weights_[i], n);
        const std::vector<float> values = Values(weights_[i], n);
        for (int64_t row = 0; row < case_.rows; ++row) {
          double sum = std::inner_product(w.begin(), w.end(), x[row].begin(), 0.0);
          if (case_.bias) sum += std::fabs(biases_[i].Row(0)[n]);
          if (case_.accumulate) sum += std::fabs(outs_[i].Row(row)[n]);
          double limit = units[row] * sum;
          if (rounds_codebook) limit += CodebookRounding(row, w, CodebookSteps(weights_[i], n));
          if (products != DType::kF32) limit += FactorRounding(row, values, arithmetic);
          tolerance[first + row * n_end + n] = static_cast<float>(limit);
        }
      }
    }
    return tolerance;
  }
  absl::Status CheckGuards() const override {
    TREADLE_RETURN_IF_ERROR(x_.CheckGuards("x", true));
    for (const GuardedTensor& out : outs_) TREADLE_RETURN_IF_ERROR(out.CheckGuards("out", false));
    return absl::OkStatus();
  }
  int64_t rows() const override { return case_.rows; }
  double bytes() const override {
    double total =
        static_cast<double>(SizeOf(x_.dtype())) * static_cast<double>(case_.rows * case_.cols);
    for (size_t i = 0; i < weights_.size(); ++i) {
      total += static_cast<double>(weights_[i].packed->bytes());
      total += (case_.accumulate ? 8.0 : 4.0) * static_cast<double>(case_.rows * case_.outputs[i]);
    }
    return total;
  }
  double operations() const override {
    const int64_t n = std::accumulate(case_.outputs.begin(), case_.outputs.end(), int64_t{0});
    return 2.0 * static_cast<double>(n * case_.cols * case_.rows);
  }

 private:
  bool RowInt8() const { return case_.format->activations == ActivationPolicy::kRowInt8; }
  bool IsOutlier(float x) const {
    return case_.outlier_threshold > 0 && !(std::fabs(x) < case_.outlier_threshold);
  }

  // In threes: the first row has a few (as real models: in features that recur, and elsewhere), the
  // last has elements just below the threshold, and the other none.
  void PlantOutliers(Random& random) {
    const int64_t feature = random.Below(case_.cols);
    for (int64_t row = 0; row < case_.rows; ++row) {
      float* x = x_.Row(row);
      if (row % 3 == 2) x[feature] = std::nextafter(6.0f, 0.0f);
      if (row % 3 != 0) continue;
      x[feature] = row % 2 == 0 ? 6.0f : -60.0f;
      for (int64_t i = 0; i < case_.cols / 512; ++i) x[random.Below(case_.cols)] = 25.0f;
      if (row % 4 == 3) x[0] = x[case_.cols - 1] = -7.5f;
    }
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

  static std::deque<Weight> MakeWeights(const OpCase& c, Backend& backend, uint64_t seed) {
    std::deque<Weight> weights;
    for (const int64_t n : c.outputs) weights.emplace_back(c, backend, n, seed + weights.size());
    return weights;
  }
  static DType InputTypeOf(const OpCase& c, const Backend& backend,
                           const std::deque<Weight>& weights) {
    if (!c.input_type) return DType::kF32;
    std::vector<const PackedMatrix*> packed;
    for (const Weight& weight : weights) packed.push_back(weight.packed.get());
    return backend.InputType(packed);
  }

  const OpCase case_;
  Backend& backend_;
  const std::deque<Weight> weights_;
  GuardedTensor x_;
  std::deque<GuardedTensor> outs_, biases_;
  std::vector<Projection> projections_;
};

}  // namespace

std::unique_ptr<OpRun> MakeEmbed(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<Embed>(op_case, backend, seed);
}
std::unique_ptr<OpRun> MakeMatMul(const OpCase& op_case, Backend& backend, uint64_t seed) {
  return std::make_unique<MatMul>(op_case, backend, seed);
}

}  // namespace treadle::op_runs
