#include "models/checkpoints/converted_tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

bool IsDense(const WeightFormat& format) { return !format.apart() && format.block == 1; }

// Whole rows of an inline format, in another order.
std::vector<std::byte> Reordered(const StoredTensor& tensor, std::span<const int32_t> order) {
  const size_t row = tensor.bytes / order.size();
  std::vector<std::byte> out(tensor.bytes);
  for (size_t i = 0; i < order.size(); ++i) {
    std::memcpy(out.data() + i * row, tensor.data + static_cast<size_t>(order[i]) * row, row);
  }
  return out;
}

absl::StatusOr<ConvertedTensor> AsStored(const StoredTensor& tensor, const TensorTarget& target) {
  ConvertedTensor out;
  out.name = target.name;
  out.format = tensor.format;
  out.shape = tensor.shape;
  out.data = {tensor.data, static_cast<size_t>(tensor.bytes)};
  if (tensor.arranged) {
    TREADLE_CHECK(target.row_order.empty());
    out.own = tensor.arranged();
    out.data = out.own;
  } else if (tensor.format->apart()) {
    TREADLE_ASSIGN_OR_RETURN(out.constants, tensor.constants());
  } else if (!target.row_order.empty()) {
    out.own = Reordered(tensor, target.row_order);
    out.data = out.own;
  }
  return out;
}

// values: [n, k]; the result: [k, n].
std::vector<float> Transposed(std::span<const float> values, int64_t n, int64_t k) {
  std::vector<float> out(values.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < k; ++j) out[j * n + i] = values[i * k + j];
  }
  return out;
}

void ReorderColumns(std::span<const int32_t> order, std::vector<float>& values) {
  std::vector<float> row(order.size());
  for (auto begin = values.begin(); begin != values.end(); begin += std::ssize(row)) {
    for (size_t i = 0; i < order.size(); ++i) row[i] = begin[order[i]];
    std::ranges::copy(row, begin);
  }
}

ConversionError Compare(std::span<const float> values, const MatrixSource& made,
                        const ParallelFor& parallel_for) {
  std::mutex mutex;
  double sum = 0, squares = 0, norm = 0;
  ConversionError error;
  parallel_for(made.n, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(made.k));
    double my_sum = 0, my_squares = 0, my_norm = 0, my_worst = 0;
    for (int64_t i = begin; i < end; ++i) {
      DecodeSourceRow(made, i, row.data());
      const float* original = values.data() + i * made.k;
      for (int64_t j = 0; j < made.k; ++j) {
        const double difference = std::abs(double{row[j]} - double{original[j]});
        my_sum += difference;
        my_squares += difference * difference;
        my_norm += double{original[j]} * double{original[j]};
        my_worst = std::max(my_worst, difference);
      }
    }
    const std::lock_guard lock(mutex);
    sum += my_sum;
    squares += my_squares;
    norm += my_norm;
    error.worst = std::max(error.worst, my_worst);
  });
  error.mean_absolute = sum / static_cast<double>(values.size());
  error.relative = norm > 0 ? std::sqrt(squares / norm) : 0;
  return error;
}

}  // namespace

std::vector<float> DecodeMatrix(const MatrixSource& source, const ParallelFor& parallel_for) {
  std::vector<float> values(static_cast<size_t>(source.n * source.k));
  parallel_for(source.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      DecodeSourceRow(source, source.SourceRow(row), values.data() + row * source.k);
    }
  });
  return values;
}

absl::StatusOr<ConvertedTensor> ConvertTensor(const StoredTensor& tensor,
                                              const TensorTarget& target,
                                              const ParallelFor& parallel_for,
                                              ConversionError* error) {
  const QuantizeSpec* to = target.to;
  const bool from_turned = target.transposed && IsDense(*tensor.format);
  const bool to_turned =
      target.transposed && !target.to_gguf && (to == nullptr || IsDense(*to->format));
  const bool same_values = target.more == 0 && target.column_order.empty() && !target.to_rates;
  if (to == nullptr || (to->format == tensor.format && !tensor.format->apart() &&
                        from_turned == to_turned && same_values)) {
    return AsStored(tensor, target);
  }
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), Str("tensor '", tensor.name, "' to ", to->name, ": ",
                                           std::string(status.message())));
  };
  TREADLE_CHECK(tensor.shape.size() <= 2);
  // A vector is a matrix of one column. Turning it before and after changes nothing.
  const int64_t extents[] = {tensor.shape[0], tensor.shape.size() == 2 ? tensor.shape[1] : 1};
  const bool turn = from_turned && !to_turned;
  MatrixConstants constants;
  TREADLE_ASSIGN_OR_RETURN(MatrixSource source, SourceOf(tensor, extents[turn ? 1 : 0],
                                                         extents[turn ? 0 : 1], constants));
  source.row_order = target.row_order;
  source.transposed = turn;
  if (const absl::Status status = CheckMatrixSource(source); !status.ok()) return named(status);
  std::vector<float> values = DecodeMatrix(source, parallel_for);
  for (float& value : values) value = target.to_rates ? -std::exp(value) : value + target.more;
  if (!target.column_order.empty()) ReorderColumns(target.column_order, values);
  std::vector<int64_t> shape = {source.n, source.k};
  if (!from_turned && to_turned) {
    values = Transposed(values, source.n, source.k);
    std::swap(shape[0], shape[1]);
  }
  auto made = Quantize(*to, values, shape[0], shape[1], parallel_for, target.importance);
  if (!made.ok()) return named(made.status());
  if (error != nullptr) *error = Compare(values, made->source(), parallel_for);
  ConvertedTensor out;
  out.name = target.name;
  out.format = to->format;
  shape.resize(tensor.shape.size());
  out.shape = std::move(shape);
  out.own = std::move(made->data);
  out.data = out.own;
  out.constants = std::move(made->constants);
  out.constants.outlier_threshold = constants.outlier_threshold;
  out.nested = std::move(made->nested);
  out.spec = to->name;
  out.to_keep = target.to_keep;
  return out;
}

}  // namespace treadle
