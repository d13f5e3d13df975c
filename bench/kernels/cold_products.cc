#include "bench/kernels/cold_products.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

// Matrices so small that more would be needed are nobody's bottleneck.
constexpr double kMaxCopies = 4096;

constexpr int64_t kOutlierColumns = 12;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Buffer Allocate(Backend& backend, int64_t elements, DType dtype = DType::kF32) {
  auto buffer = backend.Allocate(static_cast<size_t>(elements) * SizeOf(dtype));
  TREADLE_CHECK(buffer.ok());
  return *std::move(buffer);
}

double BytesOf(const MatrixSource& source) {
  const size_t constants =
      source.constants == nullptr ? 0 : source.constants->scales.size() * sizeof(float);
  return static_cast<double>(source.format->MatrixBytes(source.n, source.k)) +
         static_cast<double>(constants);
}

}  // namespace

ColdProducts::ColdProducts(Backend& backend, std::span<const MatrixSource> sources,
                           const Options& options)
    : backend_(backend), options_(options) {
  const int64_t rows = options.max_rows;
  for (const MatrixSource& source : sources) {
    Output& output = outputs_.emplace_back();
    output.buffer = Allocate(backend, rows * source.n);
    output.tensor = DenseTensor(output.buffer.data(), DType::kF32, rows, source.n);
    weight_bytes_ += BytesOf(source);
    features_ += source.n;
  }
  const int64_t copies = Copies(options, weight_bytes_);
  for (int64_t i = 0; i < copies; ++i) {
    for (MatrixSource source : sources) {
      source.of_layer = true;
      auto packed = backend.Pack(source);
      TREADLE_CHECK(packed.ok());
      packed_.push_back(*std::move(packed));
    }
  }
  MakeInput(sources[0].k);
}

void ColdProducts::MakeInput(int64_t k) {
  std::vector<const PackedMatrix*> weights;
  for (size_t i = 0; i < outputs_.size(); ++i) weights.push_back(packed_[i].get());
  const DType dtype = backend_.InputType(weights);
  input_buffer_ = Allocate(backend_, options_.max_rows * k, dtype);
  input_ = DenseTensor(input_buffer_.data(), dtype, options_.max_rows, k);
  const std::vector<float> floats = Activations(options_.max_rows, k);
  const auto fill = [&](auto convert) {
    std::vector<decltype(convert(0.0f))> x(floats.size());
    std::ranges::transform(floats, x.begin(), convert);
    backend_.CopyToDevice(input_buffer_.data(), x.data(), x.size() * sizeof(x[0]));
  };
  if (dtype == DType::kF32) {
    fill([](float x) { return x; });
  } else if (dtype == DType::kF16) {
    fill(ToHalf);
  } else {
    fill(ToBFloat16);
  }
}

std::vector<float> ColdProducts::Activations(int64_t rows, int64_t k) {
  std::vector<float> x(static_cast<size_t>(rows * k));
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.25f * (static_cast<float>(i % 17) - 8.0f);
  const int64_t step = std::max<int64_t>(1, k / kOutlierColumns);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < kOutlierColumns && i * step < k; ++i) x[row * k + i * step] = 20.0f;
  }
  return x;
}

int64_t ColdProducts::Copies(const Options& options, double weight_bytes) {
  const double wanted = std::ceil(static_cast<double>(options.cold_bytes) / weight_bytes);
  return static_cast<int64_t>(std::clamp(wanted, 1.0, kMaxCopies));
}

double ColdProducts::bytes(int64_t rows) const {
  const auto row_bytes = static_cast<int64_t>(SizeOf(input_.dtype)) * input_.cols +
                         static_cast<int64_t>(sizeof(float)) * features_;
  return weight_bytes_ + static_cast<double>(rows * row_bytes);
}

double ColdProducts::operations(int64_t rows) const {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(input_.cols * features_);
}

double ColdProducts::Run(int64_t rows) {
  const Tensor input = input_.Rows(0, rows);
  std::vector<Projection> projections(outputs_.size());
  times_.clear();
  const auto begin = Clock::now();
  for (size_t first = 0; first < packed_.size(); first += outputs_.size()) {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      projections[i] = {packed_[first + i].get(), nullptr, outputs_[i].tensor.Rows(0, rows),
                        options_.accumulate};
    }
    const auto start = Clock::now();
    backend_.MatMul(input, projections);
    times_.push_back(SecondsSince(start));
  }
  if (options_.asynchronous) {
    TREADLE_CHECK(backend_.Synchronize().ok());
    return SecondsSince(begin) / static_cast<double>(times_.size());
  }
  const auto middle = times_.begin() + std::ssize(times_) / 2;
  std::nth_element(times_.begin(), middle, times_.end());
  return *middle;
}

}  // namespace treadle
