// Float weights: f32, f16 and bf16 matrices, and any other format that no family of its own takes,
// as the floats that it decodes to.
//
// Stored in MatMulOptions::dtype, whatever the source's type: the matrix instructions want both
// operands in one type. bf16 weights under f16 lose what lies beyond f16's range (they saturate),
// f16 weights under bf16 three bits.
//
// Few rows run on an own kernel that reads each weight once (dense_stream.cu); more on cuBLASLt,
// or, with `deterministic`, on tiles with the own kernel's order of sums (dense_tiles.cu). Cost of
// `deterministic`, by estimate: decoding none, prompts twice cuBLASLt's time. f32 runs on
// dense_f32.cu, or for more rows on cuBLASLt.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/dense/cublas_lt.h"
#include "kernels/cuda/dense/dense_kernels.h"
#include "kernels/cuda/matmul_family.h"

namespace treadle::cuda {

void PackDenseRows(const MatrixSource& source, DType dtype, int64_t begin, int64_t count,
                   std::byte* out) {
  const int64_t size = static_cast<int64_t>(SizeOf(dtype));
  const int64_t row_bytes = DenseStride(source.k) * size;
  const bool as_it_is = source.format->name == Name(dtype) && !source.transposed;
  std::vector<float> values(static_cast<size_t>(as_it_is ? 0 : source.k));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = source.SourceRow(begin + i);
    std::byte* row = out + i * row_bytes;
    if (as_it_is) {
      std::memcpy(row, source.data + from * source.k * size, static_cast<size_t>(source.k * size));
    } else {
      DecodeSourceRow(source, from, values.data());
      for (int64_t column = 0; column < source.k; ++column) {
        StoreElement(dtype, values[column], row, column);
      }
    }
    std::memset(row + source.k * size, 0, static_cast<size_t>(row_bytes - source.k * size));
  }
}

namespace {

class DenseMatrix final : public CudaMatrix {
 public:
  DenseMatrix(MatMulFamily& family, const MatrixSource& source, Buffer buffer)
      : CudaMatrix(family, *source.format, source.n, source.k), buffer_(std::move(buffer)) {}
  size_t bytes() const override { return buffer_.bytes(); }
  // [n, DenseStride(k)]
  const void* data() const { return buffer_.data(); }

 private:
  const Buffer buffer_;
};

const void* WeightsOf(const PackedMatrix& matrix) {
  return static_cast<const DenseMatrix&>(matrix).data();
}

class DenseFamily final : public MatMulFamily {
 public:
  DenseFamily(Device& device, const MatMulOptions& options)
      : device_(device), options_(options), upload_(device, options.threads) {}

  bool Takes(const MatrixSource& source) const override {
    return source.format->activations == ActivationPolicy::kFloat;
  }

  // Errors: a bad source; no memory (in terms of the matrix).
  absl::StatusOr<std::unique_ptr<CudaMatrix>> Pack(const MatrixSource& source) override {
    TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
    const int64_t row_bytes = DenseStride(source.k) * static_cast<int64_t>(SizeOf(options_.dtype));
    auto allocated = device_.Allocate(static_cast<size_t>(source.n * row_bytes));
    if (!allocated.ok()) {
      return ResourceExhausted("matrix [", source.n, ", ", source.k, "] as ", Name(options_.dtype),
                               ": ", allocated.status().message());
    }
    TREADLE_RETURN_IF_ERROR(upload_.Copy(allocated->data(), source.n, row_bytes,
                                         [&](int64_t row, int64_t count, std::byte* out) {
                                           PackDenseRows(source, options_.dtype, row, count, out);
                                         }));
    return std::make_unique<DenseMatrix>(*this, source, *std::move(allocated));
  }

  absl::Status Reserve(int64_t, int64_t, int64_t) override {
    upload_.End();
    if (options_.deterministic || library_ != nullptr) return absl::OkStatus();
    TREADLE_ASSIGN_OR_RETURN(library_, CublasLt::Create(device_));
    return absl::OkStatus();
  }

  bool Rounds(const CudaMatrix&) const override { return options_.dtype != DType::kF32; }

  void Multiply(const MatMulInput& input, std::span<const Projection> projections) override {
    const bool by_library = ByLibrary(input.x.rows);
    while (!projections.empty()) {
      if (by_library && MultiplyByLibrary(input, projections.front())) {
        projections = projections.subspan(1);
        continue;
      }
      if (by_library) SayFallback(input.x.rows, *projections.front().weight);
      const size_t count = by_library ? 1 : std::min<size_t>(projections.size(), kMaxSegments);
      MultiplyOwn(input, projections.first(count));
      projections = projections.subspan(count);
    }
  }

  void Embed(const CudaMatrix& table, const EmbedRows& rows) override {
    LaunchDenseEmbed(device_, {.table = WeightsOf(table),
                               .stride = DenseStride(table.k()),
                               .dtype = options_.dtype,
                               .rows = rows});
  }

 private:
  bool ByLibrary(int64_t rows) const {
    const int64_t few = std::min(options_.few_rows.value_or(kDenseStreamRows), kDenseStreamRows);
    return library_ != nullptr && rows > few;
  }

  // At most kMaxSegments of them.
  void MultiplyOwn(const MatMulInput& input, std::span<const Projection> projections) {
    const bool floats = options_.dtype == DType::kF32;
    DenseProduct product;
    for (const Projection& projection : projections) {
      product.segments[product.num_segments++] = {
          {projection.bias, projection.out, projection.accumulate}, WeightsOf(*projection.weight)};
    }
    product.rows = static_cast<int32_t>(input.x.rows);
    product.k = static_cast<int32_t>(input.x.cols);
    product.dtype = options_.dtype;
    product.x = floats ? input.x.data : input.x16;
    product.x_stride = floats ? input.x.stride : input.stride16;
    if (floats) {
      LaunchDenseF32(device_, product);
    } else if (product.rows <= kDenseStreamRows) {
      LaunchDenseStream(device_, product,
                        {.multiprocessors = device_.properties().multiprocessors,
                         .shared_bytes = device_.properties().shared_bytes_per_block});
    } else {
      LaunchDenseTiles(device_, product);
    }
  }

  // To whoever wonders about slow prompts; once.
  void SayFallback(int64_t rows, const PackedMatrix& weight) {
    if (std::exchange(said_fallback_, true)) return;
    const std::string text =
        Str("treadle: ", device_.properties().name, ": cuBLASLt has no algorithm for a product of ",
            rows, " rows, ", weight.k(), " inputs and ", weight.n(), " outputs in ",
            Name(options_.dtype), "; own kernels, which are slower, do it\n");
    std::fputs(text.c_str(), stderr);
  }

  bool MultiplyByLibrary(const MatMulInput& input, const Projection& projection) {
    const bool floats = options_.dtype == DType::kF32;
    const int64_t stride = DenseStride(projection.weight->k());
    return library_->Multiply({.weights = WeightsOf(*projection.weight),
                               .weight_stride = stride,
                               .x = floats ? input.x.data : input.x16,
                               .x_stride = floats ? input.x.stride : input.stride16,
                               .bias = projection.bias,
                               .out = projection.out.Row<float>(0),
                               .out_stride = projection.out.stride,
                               .dtype = options_.dtype,
                               .rows = input.x.rows,
                               .n = projection.weight->n(),
                               // 16-bit operands are padded with zeros, and multiples of 64 are
                               // what fast algorithms want.
                               .k = floats ? projection.weight->k() : stride,
                               .accumulate = projection.accumulate});
  }

  Device& device_;
  const MatMulOptions options_;
  StagedUpload upload_;                // until Reserve
  std::unique_ptr<CublasLt> library_;  // since Reserve; null with `deterministic`
  bool said_fallback_ = false;
};

}  // namespace

std::unique_ptr<MatMulFamily> MakeDenseFamily(Device& device, const MatMulOptions& options) {
  return std::make_unique<DenseFamily>(device, options);
}

}  // namespace treadle::cuda
