#include "kernels/cuda/dense/dense.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "kernels/cuda/dense/dense_pack.h"

namespace treadle::cuda {
namespace {

constexpr int64_t kStagingBytes = int64_t{32} << 20;

const DenseMatrix& MatrixOf(const Projection& projection) {
  return static_cast<const DenseMatrix&>(*projection.weight);
}

}  // namespace

bool DenseFamily::Takes(const MatrixSource& source) const {
  return source.format->activations == ActivationPolicy::kFloat;
}

absl::StatusOr<std::unique_ptr<CudaMatrix>> DenseFamily::Pack(const MatrixSource& source) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  const int64_t row_bytes = DenseStride(source.k) * static_cast<int64_t>(SizeOf(options_.dtype));
  auto allocated = device_.Allocate(static_cast<size_t>(source.n * row_bytes));
  if (!allocated.ok()) {
    return ResourceExhausted("matrix [", source.n, ", ", source.k, "] as ", Name(options_.dtype),
                             ": ", allocated.status().message());
  }
  const int64_t chunk = std::clamp<int64_t>(kStagingBytes / row_bytes, 1, source.n);
  if (staging_.bytes() < static_cast<size_t>(chunk * row_bytes)) {
    staging_ = Buffer();
    TREADLE_ASSIGN_OR_RETURN(
        staging_,
        device_.AllocateHost(static_cast<size_t>(std::max(chunk * row_bytes, kStagingBytes))));
  }
  for (int64_t row = 0; row < source.n; row += chunk) {
    const int64_t count = std::min(chunk, source.n - row);
    PackDenseRows(source, options_.dtype, row, count, options_.threads, staging_.data());
    device_.CopyToDevice(allocated->data() + row * row_bytes, staging_.data(),
                         static_cast<size_t>(count * row_bytes));
  }
  return std::make_unique<DenseMatrix>(*this, source, *std::move(allocated));
}

absl::Status DenseFamily::Reserve(int64_t, int64_t, int64_t) {
  staging_ = Buffer();
  if (options_.deterministic || library_ != nullptr) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(library_, CublasLt::Create(device_));
  return absl::OkStatus();
}

bool DenseFamily::ByLibrary(int64_t rows) const {
  const int64_t few = std::min(options_.few_rows.value_or(kDenseStreamRows), kDenseStreamRows);
  return library_ != nullptr && rows > few;
}

void DenseFamily::Multiply(const MatMulInput& input, std::span<const Projection> projections) {
  const bool by_library = ByLibrary(input.x.rows);
  while (!projections.empty()) {
    if (by_library && MultiplyByLibrary(input, projections.front())) {
      projections = projections.subspan(1);
      continue;
    }
    const size_t count = by_library ? 1 : std::min<size_t>(projections.size(), kMaxSegments);
    MultiplyOwn(input, projections.first(count));
    projections = projections.subspan(count);
  }
}

void DenseFamily::MultiplyOwn(const MatMulInput& input, std::span<const Projection> projections) {
  DenseProduct product;
  for (const Projection& projection : projections) {
    DenseSegment& segment = product.segments[product.num_segments++];
    segment.weights = MatrixOf(projection).data();
    segment.bias = projection.bias;
    segment.out = projection.out.Row<float>(0);
    segment.out_stride = projection.out.stride;
    segment.n = static_cast<int32_t>(projection.weight->n());
    segment.accumulate = projection.accumulate;
  }
  product.rows = static_cast<int32_t>(input.x.rows);
  product.k = static_cast<int32_t>(input.x.cols);
  product.dtype = options_.dtype;
  const bool floats = options_.dtype == DType::kF32;
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

bool DenseFamily::MultiplyByLibrary(const MatMulInput& input, const Projection& projection) {
  const bool floats = options_.dtype == DType::kF32;
  LibraryProduct product;
  product.weights = MatrixOf(projection).data();
  product.weight_stride = DenseStride(projection.weight->k());
  product.x = floats ? input.x.data : input.x16;
  product.x_stride = floats ? input.x.stride : input.stride16;
  product.bias = projection.bias;
  product.out = projection.out.Row<float>(0);
  product.out_stride = projection.out.stride;
  product.dtype = options_.dtype;
  product.rows = input.x.rows;
  product.n = projection.weight->n();
  // 16-bit operands are padded with zeros, and multiples of 64 are what fast algorithms want.
  product.k = floats ? projection.weight->k() : DenseStride(projection.weight->k());
  product.accumulate = projection.accumulate;
  return library_->Multiply(product);
}

void DenseFamily::Embed(const CudaMatrix& table, const EmbedIds& ids, bool accumulate, Tensor out) {
  EmbedProduct embed;
  embed.table = static_cast<const DenseMatrix&>(table).data();
  embed.stride = DenseStride(table.k());
  embed.dtype = options_.dtype;
  embed.ids = ids;
  embed.out = out.Row<float>(0);
  embed.out_stride = out.stride;
  embed.k = static_cast<int32_t>(table.k());
  embed.accumulate = accumulate;
  LaunchDenseEmbed(device_, embed, out.rows);
}

std::unique_ptr<MatMulFamily> MakeDenseFamily(Device& device, const MatMulOptions& options) {
  return std::make_unique<DenseFamily>(device, options);
}

}  // namespace treadle::cuda
