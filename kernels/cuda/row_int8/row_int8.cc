// LLM.int8() (Dettmers, chapter 2): vector-wise 8-bit products whose outliers stay floats, as
// kernels/backend.h defines them. Results have the CPU backend's bits, for any number of rows.
//
// Activations are quantized once for all projections that share a threshold and a rule; one row is
// quantized by the product's own kernel. Three kinds of kernel, by the number of rows:
// row_int8_stream.cu up to kInt8StreamRows, row_int8_tiles.cu above. Nothing goes to the host.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "base/status.h"
#include "kernels/cuda/matmul_family.h"
#include "kernels/cuda/row_int8/row_int8_kernels.h"

namespace treadle::cuda {
namespace {

void PackGroup(const MatrixSource& source, int64_t group, uint8_t* out) {
  const int64_t units = Int8Units(source.k);
  std::memset(out, 0, static_cast<size_t>(units * kInt8WeightUnitBytes));
  for (int64_t i = 0; i < kInt8GroupFeatures; ++i) {
    const int64_t feature = group * kInt8GroupFeatures + i;
    if (feature >= source.n) return;
    const std::byte* codes = source.data + source.SourceRow(feature) * source.k;
    for (int64_t column = 0; column < source.k; column += 4) {  // four columns are one word
      const auto bytes = static_cast<size_t>(std::min<int64_t>(4, source.k - column));
      std::memcpy(out + Int8WeightByte(i, column, units), codes + column, bytes);
    }
  }
}

int64_t GroupsOf(int64_t n) { return (n + kInt8GroupFeatures - 1) / kInt8GroupFeatures; }
int64_t CodeBytes(int64_t n, int64_t k) {
  return GroupsOf(n) * Int8Units(k) * kInt8WeightUnitBytes;
}

class Int8Matrix final : public CudaMatrix {
 public:
  Int8Matrix(MatMulFamily& family, const MatrixSource& source, Buffer buffer)
      : CudaMatrix(family, *source.format, source.n, source.k), buffer_(std::move(buffer)) {
    const MatrixConstants& constants = *source.constants;
    if (!(constants.outlier_threshold > 0)) return;
    threshold_bits_ = std::bit_cast<uint32_t>(constants.outlier_threshold);
    of_call_ = constants.outlier_rule == OutlierRule::kPerCall;
  }
  size_t bytes() const override { return buffer_.bytes(); }
  // [n / 32, units] units, then the scales [n]; see row_int8_kernels.h.
  const uint8_t* codes() const { return reinterpret_cast<const uint8_t*>(buffer_.data()); }
  const float* scales() const {
    return reinterpret_cast<const float*>(buffer_.data() + CodeBytes(n(), k()));
  }
  // Int8Input::threshold_bits and of_call: products of one kind share an input.
  std::pair<uint32_t, bool> kind() const { return {threshold_bits_, of_call_}; }

 private:
  const Buffer buffer_;
  uint32_t threshold_bits_ = ~uint32_t{0};
  bool of_call_ = false;
};

const Int8Matrix& MatrixOf(const PackedMatrix& matrix) {
  return static_cast<const Int8Matrix&>(matrix);
}

class RowInt8Family final : public MatMulFamily {
 public:
  RowInt8Family(Device& device, const MatMulOptions& options)
      : device_(device), options_(options), upload_(device, options.threads) {}

  bool Takes(const MatrixSource& source) const override {
    return source.format->activations == ActivationPolicy::kRowInt8;
  }

  // Errors: a bad source, more columns than kMaxInt8Columns, no memory.
  absl::StatusOr<std::unique_ptr<CudaMatrix>> Pack(const MatrixSource& source) override {
    TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
    if (source.k > kMaxInt8Columns) {
      return InvalidArgument("a matrix of ", source.k, " input features in ", source.format->name,
                             ": expected at most ", kMaxInt8Columns);
    }
    const int64_t code_bytes = CodeBytes(source.n, source.k);
    const auto scale_bytes = static_cast<size_t>(source.n) * sizeof(float);
    auto allocated = device_.Allocate(static_cast<size_t>(code_bytes) + scale_bytes);
    if (!allocated.ok()) {
      return ResourceExhausted("matrix [", source.n, ", ", source.k, "] in ", source.format->name,
                               ": ", allocated.status().message());
    }
    TREADLE_RETURN_IF_ERROR(upload_.Copy(
        allocated->data(), GroupsOf(source.n), Int8Units(source.k) * kInt8WeightUnitBytes,
        [&](int64_t group, int64_t count, std::byte* out) {
          PackInt8Groups(source, group, count, reinterpret_cast<uint8_t*>(out));
        }));
    std::vector<float> scales(static_cast<size_t>(source.n));
    for (int64_t i = 0; i < source.n; ++i) {
      scales[i] = source.constants->scales[source.SourceRow(i)];
    }
    device_.CopyToDevice(allocated->data() + code_bytes, scales.data(), scale_bytes);
    packed_ = true;
    if (max_rows_ > 0) TREADLE_RETURN_IF_ERROR(AllocateScratch());
    return std::make_unique<Int8Matrix>(*this, source, *std::move(allocated));
  }

  absl::Status Reserve(int64_t max_rows, int64_t max_k, int64_t) override {
    upload_.End();
    max_rows_ = max_rows;
    max_k_ = max_k;
    return packed_ ? AllocateScratch() : absl::OkStatus();
  }

  bool Rounds(const CudaMatrix&) const override { return false; }

  void Multiply(const MatMulInput& input, std::span<const Projection> projections) override {
    TREADLE_CHECK(input.x.dtype == DType::kF32);
    if (input.x.rows == 0) return;
    const auto kind_of = [](const Projection& p) { return MatrixOf(*p.weight).kind(); };
    for (size_t i = 0; i < projections.size(); ++i) {
      const auto kind = kind_of(projections[i]);
      if (std::ranges::count(projections.first(i), kind, kind_of) > 0) continue;
      Int8Product product;
      product.input = InputOf(input.x, kind);
      product.input.owners = input.owners;
      product.sums = reinterpret_cast<int32_t*>(sums_.data());
      product.arrivals = reinterpret_cast<uint32_t*>(arrivals_.data());
      if (!Streams(input.x.rows) || !Int8StreamQuantizes(device_, input.x.rows, input.x.cols)) {
        LaunchInt8Quantize(device_, product.input);
      }
      for (const Projection& projection : projections.subspan(i)) {
        if (kind_of(projection) != kind) continue;
        const Int8Matrix& matrix = MatrixOf(*projection.weight);
        TREADLE_CHECK(matrix.k() == input.x.cols && matrix.n() == projection.out.cols &&
                      projection.out.rows == input.x.rows);
        product.segments[product.num_segments++] = {
            {projection.bias, projection.out, projection.accumulate},
            matrix.codes(),
            matrix.scales()};
        if (product.num_segments == kMaxSegments) Launch(product);
      }
      if (product.num_segments > 0) Launch(product);
    }
  }

  void Embed(const CudaMatrix& table, const EmbedRows& rows) override {
    const Int8Matrix& matrix = MatrixOf(table);
    LaunchInt8Embed(device_, {.codes = matrix.codes(),
                              .scales = matrix.scales(),
                              .units = static_cast<int32_t>(Int8Units(matrix.k())),
                              .rows = rows});
  }

 private:
  // Scratch for what Reserve was told.
  absl::Status AllocateScratch() {
    const Int8ScratchBytes wanted = Int8Scratch(max_rows_, max_k_);
    const int multiprocessors = device_.properties().multiprocessors;
    const size_t arrival_bytes =
        sizeof(uint32_t) * static_cast<size_t>(Int8Arrivals(multiprocessors));
    TREADLE_RETURN_IF_ERROR(Grow(device_, wanted.codes, codes_));
    TREADLE_RETURN_IF_ERROR(Grow(device_, wanted.row_info, row_info_));
    TREADLE_RETURN_IF_ERROR(Grow(device_, wanted.call_flags, call_flags_));
    TREADLE_RETURN_IF_ERROR(Grow(device_, Int8SumBytes(multiprocessors), sums_));
    return Grow(device_, arrival_bytes, arrivals_);
  }

  // x as a kind of matrices wants it, and scratch, which Reserve has made.
  Int8Input InputOf(const Tensor& x, std::pair<uint32_t, bool> kind) const {
    const Int8ScratchBytes wanted = Int8Scratch(x.rows, x.cols);
    TREADLE_CHECK(wanted.codes <= codes_.bytes() && wanted.row_info <= row_info_.bytes() &&
                  wanted.call_flags <= call_flags_.bytes());
    return {.x = x.Row<float>(0),
            .x_stride = x.stride,
            .rows = static_cast<int32_t>(x.rows),
            .k = static_cast<int32_t>(x.cols),
            .units = static_cast<int32_t>(Int8Units(x.cols)),
            .threshold_bits = kind.first,
            .of_call = kind.second,
            .codes = reinterpret_cast<uint8_t*>(codes_.data()),
            .row_info = reinterpret_cast<Int8Row*>(row_info_.data()),
            .call_flags = reinterpret_cast<uint32_t*>(call_flags_.data())};
  }

  bool Streams(int64_t rows) const {
    return rows <= std::min(options_.few_rows.value_or(kInt8StreamRows), kInt8StreamRows);
  }

  // All segments, which are then removed.
  void Launch(Int8Product& product) {
    if (Streams(product.input.rows)) {
      LaunchInt8Stream(device_, product);
    } else {
      LaunchInt8Tiles(device_, product);
    }
    product.num_segments = 0;
  }

  Device& device_;
  const MatMulOptions options_;
  int64_t max_rows_ = 0;
  int64_t max_k_ = 0;
  bool packed_ = false;  // without matrices there is no scratch
  StagedUpload upload_;  // until Reserve
  Buffer codes_, row_info_, call_flags_, sums_, arrivals_;
};

}  // namespace

void PackInt8Groups(const MatrixSource& source, int64_t first, int64_t count, uint8_t* out) {
  const int64_t group_bytes = Int8Units(source.k) * kInt8WeightUnitBytes;
  for (int64_t i = 0; i < count; ++i) PackGroup(source, first + i, out + i * group_bytes);
}

std::unique_ptr<MatMulFamily> MakeRowInt8Family(Device& device, const MatMulOptions& options) {
  return std::make_unique<RowInt8Family>(device, options);
}

}  // namespace treadle::cuda
