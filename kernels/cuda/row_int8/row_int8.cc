#include "kernels/cuda/row_int8/row_int8.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "base/status.h"

namespace treadle::cuda {
namespace {

constexpr int64_t kStagingBytes = int64_t{32} << 20;

int64_t GroupsOf(int64_t n) { return (n + kInt8GroupFeatures - 1) / kInt8GroupFeatures; }
int64_t CodeBytes(int64_t n, int64_t k) {
  return GroupsOf(n) * Int8Units(k) * kInt8WeightUnitBytes;
}

const Int8Matrix& MatrixOf(const Projection& projection) {
  return static_cast<const Int8Matrix&>(*projection.weight);
}

void AddSegment(const Projection& projection, Int8Product& product) {
  const Int8Matrix& matrix = MatrixOf(projection);
  TREADLE_CHECK(matrix.k() == product.input.k && matrix.n() == projection.out.cols &&
                projection.out.rows == product.input.rows);
  Int8Segment& segment = product.segments[product.num_segments++];
  segment.codes = matrix.codes();
  segment.scales = matrix.scales();
  segment.bias = projection.bias;
  segment.out = projection.out.Row<float>(0);
  segment.out_stride = projection.out.stride;
  segment.n = static_cast<int32_t>(matrix.n());
  segment.accumulate = projection.accumulate;
}

}  // namespace

Int8Matrix::Int8Matrix(MatMulFamily& family, const MatrixSource& source, Buffer buffer)
    : CudaMatrix(family, *source.format, source.n, source.k), buffer_(std::move(buffer)) {
  const MatrixConstants& constants = *source.constants;
  if (!(constants.outlier_threshold > 0)) return;
  threshold_bits_ = std::bit_cast<uint32_t>(constants.outlier_threshold);
  of_call_ = constants.outlier_rule == OutlierRule::kPerCall;
}

const float* Int8Matrix::scales() const {
  return reinterpret_cast<const float*>(buffer_.data() + CodeBytes(n(), k()));
}

bool RowInt8Family::Takes(const MatrixSource& source) const {
  return source.format->activations == ActivationPolicy::kRowInt8;
}

absl::StatusOr<std::unique_ptr<CudaMatrix>> RowInt8Family::Pack(const MatrixSource& source) {
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
  const int64_t group_bytes = Int8Units(source.k) * kInt8WeightUnitBytes;
  const int64_t groups = GroupsOf(source.n);
  const int64_t chunk = std::clamp<int64_t>(kStagingBytes / group_bytes, 1, groups);
  if (staging_.bytes() < static_cast<size_t>(chunk * group_bytes)) {
    staging_ = Buffer();
    const int64_t bytes = std::max(chunk * group_bytes, kStagingBytes);
    TREADLE_ASSIGN_OR_RETURN(staging_, device_.AllocateHost(static_cast<size_t>(bytes)));
  }
  for (int64_t group = 0; group < groups; group += chunk) {
    const int64_t count = std::min(chunk, groups - group);
    PackInt8Groups(source, group, count, options_.threads,
                   reinterpret_cast<uint8_t*>(staging_.data()));
    device_.CopyToDevice(allocated->data() + group * group_bytes, staging_.data(),
                         static_cast<size_t>(count * group_bytes));
  }
  std::vector<float> scales(static_cast<size_t>(source.n));
  for (int64_t i = 0; i < source.n; ++i) scales[i] = source.constants->scales[source.SourceRow(i)];
  device_.CopyToDevice(allocated->data() + code_bytes, scales.data(), scale_bytes);
  packed_ = true;
  if (max_rows_ > 0) TREADLE_RETURN_IF_ERROR(Grow());
  return std::make_unique<Int8Matrix>(*this, source, *std::move(allocated));
}

absl::Status RowInt8Family::Reserve(int64_t max_rows, int64_t max_k, int64_t) {
  staging_ = Buffer();
  max_rows_ = std::max(max_rows_, max_rows);
  max_k_ = std::max(max_k_, max_k);
  return packed_ ? Grow() : absl::OkStatus();
}

absl::Status RowInt8Family::Grow() {
  const Int8ScratchBytes wanted = Int8Scratch(max_rows_, max_k_);
  const int multiprocessors = device_.properties().multiprocessors;
  const size_t arrival_bytes =
      sizeof(uint32_t) * static_cast<size_t>(Int8Arrivals(multiprocessors));
  const std::pair<Buffer*, size_t> buffers[] = {{&codes_, wanted.codes},
                                                {&row_info_, wanted.row_info},
                                                {&call_flags_, wanted.call_flags},
                                                {&sums_, Int8SumBytes(multiprocessors)},
                                                {&arrivals_, arrival_bytes}};
  for (const auto& [buffer, bytes] : buffers) {
    if (buffer->bytes() >= bytes) continue;
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());  // products may still use the old one
    *buffer = Buffer();
    TREADLE_ASSIGN_OR_RETURN(*buffer, device_.Allocate(bytes));
  }
  return absl::OkStatus();
}

Int8Input RowInt8Family::InputOf(const Tensor& x, const Int8Matrix& matrix) const {
  const Int8ScratchBytes wanted = Int8Scratch(x.rows, x.cols);
  TREADLE_CHECK(wanted.codes <= codes_.bytes() && wanted.row_info <= row_info_.bytes() &&
                wanted.call_flags <= call_flags_.bytes());
  Int8Input input;
  input.x = x.Row<float>(0);
  input.x_stride = x.stride;
  input.rows = static_cast<int32_t>(x.rows);
  input.k = static_cast<int32_t>(x.cols);
  input.units = static_cast<int32_t>(Int8Units(x.cols));
  input.threshold_bits = matrix.threshold_bits();
  input.of_call = matrix.of_call();
  input.codes = reinterpret_cast<uint8_t*>(codes_.data());
  input.row_info = reinterpret_cast<Int8Row*>(row_info_.data());
  input.call_flags = reinterpret_cast<uint32_t*>(call_flags_.data());
  return input;
}

void RowInt8Family::Multiply(const MatMulInput& input, std::span<const Projection> projections) {
  TREADLE_CHECK(input.x.dtype == DType::kF32);
  if (input.x.rows == 0) return;
  const auto same_kind = [&](const Projection& a, const Projection& b) {
    return MatrixOf(a).threshold_bits() == MatrixOf(b).threshold_bits() &&
           MatrixOf(a).of_call() == MatrixOf(b).of_call();
  };
  for (size_t i = 0; i < projections.size(); ++i) {
    const Projection& first = projections[i];
    const auto before = projections.first(i);
    if (std::any_of(before.begin(), before.end(),
                    [&](const Projection& other) { return same_kind(first, other); })) {
      continue;
    }
    Int8Product product;
    product.input = InputOf(input.x, MatrixOf(first));
    product.sums = reinterpret_cast<int32_t*>(sums_.data());
    product.arrivals = reinterpret_cast<uint32_t*>(arrivals_.data());
    if (!Streams(input.x.rows) || !Int8StreamQuantizes(device_, input.x.rows, input.x.cols)) {
      LaunchInt8Quantize(device_, product.input);
    }
    for (const Projection& projection : projections.subspan(i)) {
      if (!same_kind(first, projection)) continue;
      AddSegment(projection, product);
      if (product.num_segments == kMaxInt8Segments) Launch(product);
    }
    if (product.num_segments > 0) Launch(product);
  }
}

bool RowInt8Family::Streams(int64_t rows) const {
  return rows <= std::min(options_.few_rows.value_or(kInt8StreamRows), kInt8StreamRows);
}

void RowInt8Family::Launch(Int8Product& product) {
  if (Streams(product.input.rows)) {
    LaunchInt8Stream(device_, product);
  } else {
    LaunchInt8Tiles(device_, product);
  }
  product.num_segments = 0;
}

void RowInt8Family::Embed(const CudaMatrix& table, const EmbedIds& ids, bool accumulate,
                          Tensor out) {
  if (out.rows == 0) return;
  const auto& matrix = static_cast<const Int8Matrix&>(table);
  Int8Embed embed;
  embed.codes = matrix.codes();
  embed.scales = matrix.scales();
  embed.ids = ids;
  embed.out = out.Row<float>(0);
  embed.out_stride = out.stride;
  embed.k = static_cast<int32_t>(matrix.k());
  embed.units = static_cast<int32_t>(Int8Units(matrix.k()));
  embed.accumulate = accumulate;
  LaunchInt8Embed(device_, embed, out.rows);
}

std::unique_ptr<MatMulFamily> MakeRowInt8Family(Device& device, const MatMulOptions& options) {
  return std::make_unique<RowInt8Family>(device, options);
}

}  // namespace treadle::cuda
