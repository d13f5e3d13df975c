// Matrices kept as decoded floats, products summed in double.
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"
#include "kernels/reference/reference_ops.h"

namespace treadle {

QuantizedActivations QuantizeActivations(std::span<const float, 32> x, ComputeMode compute) {
  TREADLE_CHECK(QuantizesActivations(compute));
  const float steps = compute == ComputeMode::kInt8 ? 127.0f : 16256.0f;
  float absmax = 0;
  for (float value : x) absmax = std::fmax(absmax, std::fabs(value));
  QuantizedActivations block = {};
  if (absmax < 0x1p-100f) return block;
  block.scale = absmax / steps;
  const float inverse = steps / absmax;
  for (int i = 0; i < 32; ++i) {
    block.codes[i] = static_cast<int16_t>(std::nearbyint(x[i] * inverse));
  }
  return block;
}

namespace reference {
namespace {

class FloatMatrix final : public PackedMatrix {
 public:
  FloatMatrix(const WeightFormat& format, int64_t n, int64_t k)
      : format_(format), n_(n), k_(k), values_(static_cast<size_t>(n * k)) {}
  int64_t n() const override { return n_; }
  int64_t k() const override { return k_; }
  const WeightFormat& format() const override { return format_; }
  size_t bytes() const override { return values_.size() * sizeof(float); }
  float* Row(int64_t row) { return values_.data() + row * k_; }
  const float* Row(int64_t row) const { return values_.data() + row * k_; }

 private:
  const WeightFormat& format_;
  const int64_t n_;
  const int64_t k_;
  std::vector<float> values_;  // [n, k]
};

absl::Status CheckSource(const MatrixSource& source) {
  if (source.n < 1 || source.k < 1 || source.k % source.format->block != 0) {
    return InvalidArgument("matrix [", source.n, ", ", source.k, "] in ", source.format->name,
                           ": expected positive sizes and k in multiples of ",
                           source.format->block);
  }
  if (source.transposed && source.format->block != 1) {
    return InvalidArgument("a transposed matrix in ", source.format->name,
                           ": expected a dense format");
  }
  if (!source.row_order.empty() && static_cast<int64_t>(source.row_order.size()) != source.n) {
    return InvalidArgument("row order of ", source.row_order.size(), " rows for a matrix of ",
                           source.n);
  }
  for (int32_t row : source.row_order) {
    if (row < 0 || row >= source.n) {
      return InvalidArgument("row order names row ", row, " of a matrix of ", source.n);
    }
  }
  return absl::OkStatus();
}

// One row of the activations as the product sees it: [k].
std::vector<double> Activations(const float* x, int64_t k, ComputeMode compute) {
  std::vector<double> values(x, x + k);
  if (!QuantizesActivations(compute)) return values;
  for (int64_t begin = 0; begin < k; begin += 32) {
    const auto block = QuantizeActivations(std::span<const float, 32>(x + begin, 32), compute);
    for (int i = 0; i < 32; ++i) values[begin + i] = double{block.scale} * block.codes[i];
  }
  return values;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PackedMatrix>> Pack(const MatrixSource& source) {
  TREADLE_RETURN_IF_ERROR(CheckSource(source));
  const WeightFormat& format = *source.format;
  auto matrix = std::make_unique<FloatMatrix>(format, source.n, source.k);
  for (int64_t row = 0; row < source.n; ++row) {
    const int64_t from = source.row_order.empty() ? row : source.row_order[row];
    float* out = matrix->Row(row);
    if (!source.transposed) {
      format.decode(source.data + from * format.RowBytes(source.k), source.k / format.block, out);
      continue;
    }
    for (int64_t i = 0; i < source.k; ++i) {
      format.decode(source.data + (i * source.n + from) * format.block_bytes, 1, out + i);
    }
  }
  return matrix;
}

std::span<const float> WeightRow(const PackedMatrix& matrix, int64_t row) {
  TREADLE_CHECK(row >= 0 && row < matrix.n());
  return {static_cast<const FloatMatrix&>(matrix).Row(row), static_cast<size_t>(matrix.k())};
}

void MatMul(Tensor x, std::span<const Projection> projections, ComputeMode compute) {
  for (int64_t row = 0; row < x.rows; ++row) {
    const auto exact = Activations(x.Row<float>(row), x.cols, ComputeMode::kExact);
    const auto quantized =
        x.cols % 32 == 0 ? Activations(x.Row<float>(row), x.cols, compute) : exact;
    for (const Projection& projection : projections) {
      const PackedMatrix& weight = *projection.weight;
      TREADLE_CHECK(weight.k() == x.cols && weight.n() == projection.out.cols &&
                    projection.out.rows == x.rows);
      const auto& values = weight.format().group > 0 ? quantized : exact;
      float* out = projection.out.Row<float>(row);
      for (int64_t n = 0; n < weight.n(); ++n) {
        const auto w = WeightRow(weight, n);
        double sum = 0;
        for (int64_t k = 0; k < x.cols; ++k) sum += double{w[k]} * values[k];
        if (projection.bias != nullptr) sum += projection.bias[n];
        if (projection.accumulate) sum += out[n];
        out[n] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace reference
}  // namespace treadle
