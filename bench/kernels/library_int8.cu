#include <utility>
#include <vector>

#include "base/status.h"
#include "bench/kernels/library_int8.h"
#include "kernels/cuda/row_int8/row_int8_quantize.h"
#include "kernels/cuda/row_int8/row_int8_results.h"

namespace treadle::cuda {
namespace {

// Codes in rows, each of whole units.
TREADLE_KERNEL(kInt8QuantizeThreads) void QuantizeKernel(Int8Input p) {
  simt::AwaitEarlierLaunches();
  const int row = simt::BlockX();
  uint8_t* const codes = p.codes + int64_t{row} * p.units * kInt8Unit;
  QuantizeRow(p, row, simt::DynamicShared<Int8QuantizeShared>(), [&](int column, uint32_t word) {
    *reinterpret_cast<uint32_t*>(codes + column) = word;
  });
}

struct DequantizeParams {
  const int32_t* sums = nullptr;      // [rows, segment.n], n a multiple of four
  const Int8Row* row_info = nullptr;  // [rows]
  int32_t rows = 0;
  Int8Segment segment;  // but for its codes
};

// Memory's latency is hidden by many blocks, and by a thread's rows, which are asked for at once.
constexpr int kThreads = 256;
constexpr int kRun = 4;   // features side by side of a thread
constexpr int kRows = 4;  // rows of a thread

TREADLE_KERNEL(kThreads) void DequantizeKernel(DequantizeParams p) {
  const Int8Segment& segment = p.segment;
  const int feature = kRun * (simt::BlockY() * kThreads + simt::Thread());
  const bool inside = feature < segment.n;
  float scales[kRun] = {};
  float bias[kRun];
  if (inside) simt::LoadFloats(segment.scales + feature, scales);
  TREADLE_UNROLL
  for (int i = 0; i < kRun; ++i) {
    // Adding -0 changes nothing.
    bias[i] = inside && segment.bias != nullptr ? segment.bias[feature + i] : -0.0f;
  }
  simt::AwaitEarlierLaunches();
  if (!inside) return;
  const int row0 = kRows * simt::BlockX();
  simt::Words4 sums[kRows];
  float row_scales[kRows];
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (row0 + r >= p.rows) break;
    sums[r] =
        *reinterpret_cast<const simt::Words4*>(p.sums + int64_t{row0 + r} * segment.n + feature);
    row_scales[r] = p.row_info[row0 + r].scale;
  }
  TREADLE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (row0 + r >= p.rows) break;
    const uint32_t words[kRun] = {sums[r].x, sums[r].y, sums[r].z, sums[r].w};
    float y[kRun];
    TREADLE_UNROLL
    for (int i = 0; i < kRun; ++i) {
      y[i] = static_cast<float>(static_cast<int32_t>(words[i])) * (scales[i] * row_scales[r]);
      y[i] += bias[i];
    }
    StoreResults(segment, feature, y, segment.out + (row0 + r) * segment.out_stride);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<LibraryInt8>> LibraryInt8::Create(Device& device, int64_t max_rows,
                                                                 int64_t max_n, int64_t max_k) {
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<CublasLt> library, CublasLt::Create(device));
  std::unique_ptr<LibraryInt8> made(new LibraryInt8(device, std::move(library)));
  const auto rows = static_cast<size_t>(max_rows);
  const auto row_bytes = static_cast<size_t>(Int8Units(max_k) * kInt8Unit);
  TREADLE_ASSIGN_OR_RETURN(made->codes_, device.Allocate(rows * row_bytes));
  TREADLE_ASSIGN_OR_RETURN(made->row_info_, device.Allocate(rows * sizeof(Int8Row)));
  TREADLE_ASSIGN_OR_RETURN(made->sums_,
                           device.Allocate(rows * static_cast<size_t>(max_n) * sizeof(int32_t)));
  return made;
}

absl::StatusOr<LibraryInt8Weights> LibraryInt8::Upload(std::span<const MatrixSource> sources) {
  LibraryInt8Weights weights;
  weights.k = sources[0].k;
  std::vector<std::byte> codes;
  std::vector<float> scales;
  for (const MatrixSource& source : sources) {
    TREADLE_CHECK(source.format->activations == ActivationPolicy::kRowInt8 &&
                  source.k == weights.k);
    weights.n += source.n;
    for (int64_t i = 0; i < source.n; ++i) {
      const int64_t row = source.SourceRow(i);
      const std::byte* const from = source.data + row * source.k;
      codes.insert(codes.end(), from, from + source.k);
      scales.push_back(source.constants->scales[row]);
    }
  }
  TREADLE_ASSIGN_OR_RETURN(weights.codes, device_.Allocate(codes.size()));
  TREADLE_ASSIGN_OR_RETURN(weights.scales, device_.Allocate(scales.size() * sizeof(float)));
  device_.CopyToDevice(weights.codes.data(), codes.data(), codes.size());
  device_.CopyToDevice(weights.scales.data(), scales.data(), scales.size() * sizeof(float));
  return weights;
}

absl::StatusOr<LibraryInt8Weights> LibraryInt8::Copy(const LibraryInt8Weights& weights) {
  LibraryInt8Weights copy = {.n = weights.n, .k = weights.k};
  TREADLE_ASSIGN_OR_RETURN(copy.codes, device_.Allocate(weights.codes.bytes()));
  TREADLE_ASSIGN_OR_RETURN(copy.scales, device_.Allocate(weights.scales.bytes()));
  device_.CopyOnDevice(copy.codes.data(), weights.codes.data(), weights.codes.bytes());
  device_.CopyOnDevice(copy.scales.data(), weights.scales.data(), weights.scales.bytes());
  return copy;
}

bool LibraryInt8::Multiply(const Tensor& x, const LibraryInt8Weights& weights, const float* bias,
                           bool accumulate, const Tensor& out) {
  const int64_t row_bytes = Int8Units(weights.k) * kInt8Unit;
  TREADLE_CHECK(x.cols == weights.k && out.cols == weights.n && out.rows == x.rows);
  TREADLE_CHECK(static_cast<size_t>(x.rows * row_bytes) <= codes_.bytes() &&
                static_cast<size_t>(x.rows) * sizeof(Int8Row) <= row_info_.bytes() &&
                static_cast<size_t>(x.rows * weights.n) * sizeof(int32_t) <= sums_.bytes());
  Int8Input input;
  input.x = x.Row<float>(0);
  input.x_stride = x.stride;
  input.rows = static_cast<int32_t>(x.rows);
  input.k = static_cast<int32_t>(weights.k);
  input.units = static_cast<int32_t>(Int8Units(weights.k));
  input.codes = reinterpret_cast<uint8_t*>(codes_.data());
  input.row_info = reinterpret_cast<Int8Row*>(row_info_.data());
  device_.Launch(QuantizeKernel,
                 {.grid_x = static_cast<uint32_t>(x.rows),
                  .threads = Int8QuantizeThreads(weights.k),
                  .shared_bytes = sizeof(Int8QuantizeShared)},
                 input);

  LibraryProduct product;
  product.weights = weights.codes.data();
  product.weight_stride = weights.k;
  product.x = codes_.data();
  product.x_stride = row_bytes;
  product.out = sums_.data();
  product.out_stride = weights.n;
  product.dtype = DType::kI8;
  product.rows = x.rows;
  product.n = weights.n;
  product.k = weights.k;
  if (!library_->Multiply(product)) return false;

  DequantizeParams params;
  params.sums = reinterpret_cast<const int32_t*>(sums_.data());
  params.row_info = input.row_info;
  params.rows = input.rows;
  params.segment.scales = reinterpret_cast<const float*>(weights.scales.data());
  params.segment.bias = bias;
  params.segment.out = out.Row<float>(0);
  params.segment.out_stride = out.stride;
  params.segment.n = static_cast<int32_t>(weights.n);
  params.segment.accumulate = accumulate;
  constexpr int64_t kBlockFeatures = int64_t{kRun} * kThreads;
  device_.Launch(
      DequantizeKernel,
      {.grid_x = static_cast<uint32_t>((x.rows + kRows - 1) / kRows),
       .grid_y = static_cast<uint32_t>((weights.n + kBlockFeatures - 1) / kBlockFeatures),
       .threads = kThreads},
      params);
  return true;
}

}  // namespace treadle::cuda
