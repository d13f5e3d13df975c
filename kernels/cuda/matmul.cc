#include "kernels/cuda/matmul.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/status.h"
#include "kernels/cuda/dense/dense_kernels.h"

namespace treadle::cuda {
namespace {

MatMulFamily& FamilyOf(const PackedMatrix& matrix) {
  return static_cast<const CudaMatrix&>(matrix).family();
}

// Whether products with this matrix read MatMulInput::x16, and nothing else does.
bool Rounds(const PackedMatrix& matrix) {
  return FamilyOf(matrix).Rounds(static_cast<const CudaMatrix&>(matrix));
}

constexpr int64_t kStagingBytes = int64_t{32} << 20;

}  // namespace

absl::Status StagedUpload::Copy(
    std::byte* to, int64_t count, int64_t bytes,
    const std::function<void(int64_t first, int64_t number, std::byte* out)>& pack) {
  const int64_t chunk = std::clamp<int64_t>(kStagingBytes / bytes, 1, count);
  if (staging_.bytes() < static_cast<size_t>(chunk * bytes)) {
    staging_ = Buffer();
    const auto wanted = static_cast<size_t>(std::max(chunk * bytes, kStagingBytes));
    TREADLE_ASSIGN_OR_RETURN(staging_, device_.AllocateHost(wanted));
  }
  for (int64_t first = 0; first < count; first += chunk) {
    const int64_t number = std::min(chunk, count - first);
    InParallel(threads_, number, [&](int64_t begin, int64_t end) {
      pack(first + begin, end - begin, staging_.data() + begin * bytes);
    });
    device_.CopyToDevice(to + first * bytes, staging_.data(), static_cast<size_t>(number * bytes));
  }
  return absl::OkStatus();
}

void InParallel(int threads, int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  const int64_t pieces = std::clamp<int64_t>(threads, 1, std::max<int64_t>(count, 1));
  std::vector<std::jthread> others;
  for (int64_t i = 1; i < pieces; ++i) {
    others.emplace_back([&, i] { body(count * i / pieces, count * (i + 1) / pieces); });
  }
  body(0, count / pieces);
}

absl::Status Grow(Device& device, size_t bytes, Buffer& buffer) {
  if (bytes <= buffer.bytes()) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(device.Synchronize());  // kernels may still use the old one
  buffer = Buffer();
  TREADLE_ASSIGN_OR_RETURN(buffer, device.Allocate(bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<MatMuls>> MatMuls::Create(Device& device,
                                                         const MatMulOptions& options) {
  if (options.dtype != DType::kF32 && options.dtype != DType::kF16 &&
      options.dtype != DType::kBF16) {
    return InvalidArgument("activations of products in ", Name(options.dtype),
                           ": expected f32, f16 or bf16");
  }
  return std::unique_ptr<MatMuls>(new MatMuls(device, options));
}

MatMuls::MatMuls(Device& device, const MatMulOptions& options)
    : device_(device), options_(options) {
  for (const auto make : {MakeRowInt8Family, MakeLowBitFamily, MakeDenseFamily}) {
    families_.push_back(make(device, options));
  }
}

absl::StatusOr<std::unique_ptr<PackedMatrix>> MatMuls::Pack(const MatrixSource& source) {
  TREADLE_RETURN_IF_ERROR(CheckMatrixSource(source));
  for (const auto& family : families_) {
    if (!family->Takes(source)) continue;
    TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<CudaMatrix> matrix, family->Pack(source));
    return std::unique_ptr<PackedMatrix>(std::move(matrix));
  }
  return Unimplemented("no product of the CUDA backend takes weights in ", source.format->name);
}

DType MatMuls::InputType(std::span<const PackedMatrix* const> weights) const {
  const bool all = std::ranges::all_of(weights, [](const PackedMatrix* weight) {
    return Rounds(*weight) && weight->k() % kDenseStep == 0;
  });
  return all ? options_.dtype : DType::kF32;
}

absl::Status MatMuls::Reserve(int64_t max_rows, int64_t max_k, int64_t max_n) {
  const int64_t rows = std::max(max_rows_, max_rows);
  const int64_t k = std::max(max_k_, max_k);
  const int64_t n = std::max(max_n_, max_n);
  for (const auto& family : families_) TREADLE_RETURN_IF_ERROR(family->Reserve(rows, k, n));
  const bool halves = options_.dtype != DType::kF32;
  const size_t bytes = halves ? static_cast<size_t>(rows * DenseStride(k)) * 2 : 0;
  TREADLE_RETURN_IF_ERROR(Grow(device_, bytes, x16_));
  max_rows_ = rows;  // once it is there: whoever failed asks again
  max_k_ = k;
  max_n_ = n;
  return absl::OkStatus();
}

absl::Status MatMuls::Multiply(Tensor x, std::span<const Projection> projections,
                               const int32_t* owners) {
  if (x.rows == 0) return absl::OkStatus();
  int64_t max_n = 0;
  for (const Projection& projection : projections) {
    TREADLE_CHECK(projection.weight->k() == x.cols && projection.out.rows == x.rows &&
                  projection.out.cols == projection.weight->n());
    max_n = std::max(max_n, projection.weight->n());
  }
  if (!Holds(x.rows, x.cols, max_n)) TREADLE_RETURN_IF_ERROR(Reserve(x.rows, x.cols, max_n));
  MatMulInput input = InputOf(x, projections);
  input.owners = owners;
  for (const auto& family : families_) {
    group_.clear();
    for (const Projection& projection : projections) {
      if (&FamilyOf(*projection.weight) == family.get()) group_.push_back(projection);
    }
    if (!group_.empty()) family->Multiply(input, group_);
  }
  return absl::OkStatus();
}

MatMulInput MatMuls::InputOf(const Tensor& x, std::span<const Projection> projections) {
  const auto rounds = [](const Projection& projection) { return Rounds(*projection.weight); };
  MatMulInput input;
  input.x = x;
  input.dtype = options_.dtype;
  if (x.dtype != DType::kF32) {
    TREADLE_CHECK(x.dtype == options_.dtype && std::ranges::all_of(projections, rounds));
    TREADLE_CHECK(x.cols % kDenseStep == 0 && x.stride % 8 == 0 &&
                  reinterpret_cast<uintptr_t>(x.data) % 16 == 0);
    input.x16 = x.Row<uint16_t>(0);
    input.stride16 = x.stride;
  } else if (std::ranges::any_of(projections, rounds)) {
    auto* x16 = reinterpret_cast<uint16_t*>(x16_.data());
    input.stride16 = DenseStride(x.cols);
    LaunchConvert(device_, x, options_.dtype, x16, input.stride16);
    input.x16 = x16;
  }
  return input;
}

void MatMuls::Embed(const PackedMatrix& table, const EmbedRows& rows) {
  FamilyOf(table).Embed(static_cast<const CudaMatrix&>(table), rows);
}

}  // namespace treadle::cuda
