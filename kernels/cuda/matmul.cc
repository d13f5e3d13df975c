#include "kernels/cuda/matmul.h"

#include <algorithm>
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

}  // namespace

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
  max_rows_ = std::max(max_rows_, max_rows);
  max_k_ = std::max(max_k_, max_k);
  max_n_ = std::max(max_n_, max_n);
  for (const auto& family : families_) {
    TREADLE_RETURN_IF_ERROR(family->Reserve(max_rows_, max_k_, max_n_));
  }
  const size_t bytes =
      options_.dtype == DType::kF32 ? 0 : static_cast<size_t>(max_rows_ * DenseStride(max_k_)) * 2;
  if (bytes <= x16_.bytes()) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(device_.Synchronize());  // kernels may still read the old one
  x16_ = Buffer();
  TREADLE_ASSIGN_OR_RETURN(x16_, device_.Allocate(bytes));
  return absl::OkStatus();
}

absl::Status MatMuls::Multiply(Tensor x, std::span<const Projection> projections) {
  if (x.rows == 0) return absl::OkStatus();
  int64_t max_n = 0;
  for (const Projection& projection : projections) {
    TREADLE_CHECK(projection.weight->k() == x.cols && projection.out.rows == x.rows &&
                  projection.out.cols == projection.weight->n());
    max_n = std::max(max_n, projection.weight->n());
  }
  if (x.rows > max_rows_ || x.cols > max_k_ || max_n > max_n_) {
    TREADLE_RETURN_IF_ERROR(Reserve(x.rows, x.cols, max_n));
  }
  const MatMulInput input = InputOf(x, projections);
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

void MatMuls::Embed(const PackedMatrix& table, const EmbedIds& ids, bool accumulate, Tensor out) {
  if (out.rows == 0) return;
  FamilyOf(table).Embed(static_cast<const CudaMatrix&>(table), ids, accumulate, out);
}

}  // namespace treadle::cuda
