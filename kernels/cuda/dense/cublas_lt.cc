#include "kernels/cuda/dense/cublas_lt.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "base/status.h"
#include "kernels/cuda/runtime/shared_library.h"

namespace treadle::cuda {
namespace {

// The functions that are used here. They keep the library's names and types.
#define TREADLE_CUBLAS_LT_FUNCTIONS(X)    \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetStatusString)              \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)

struct Library {
  TREADLE_CUBLAS_LT_FUNCTIONS(TREADLE_LIBRARY_MEMBER)
};

absl::StatusOr<Library> LoadLibrary() {
  Library library;
  TREADLE_ASSIGN_OR_RETURN(void* const opened,
                           OpenLibrary(Str("libcublasLt.so.", CUBLAS_VER_MAJOR)));
  TREADLE_CUBLAS_LT_FUNCTIONS(TREADLE_LIBRARY_FIND)
  return library;
}

// Opened once per process, when the first handle is made; Lib() is for what comes after that.
const absl::StatusOr<Library>& TheLibrary() {
  static const absl::StatusOr<Library> library = LoadLibrary();
  return library;
}
const Library& Lib() { return *TheLibrary(); }

template <typename T, auto kDestroy>
struct Destroyer {
  using pointer = T;
  void operator()(T handle) const { (Lib().*kDestroy)(handle); }
};
using Handle =
    std::unique_ptr<cublasLtHandle_t, Destroyer<cublasLtHandle_t, &Library::cublasLtDestroy>>;
using Operation =
    std::unique_ptr<cublasLtMatmulDesc_t,
                    Destroyer<cublasLtMatmulDesc_t, &Library::cublasLtMatmulDescDestroy>>;
using Layout =
    std::unique_ptr<cublasLtMatrixLayout_t,
                    Destroyer<cublasLtMatrixLayout_t, &Library::cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<
    cublasLtMatmulPreference_t,
    Destroyer<cublasLtMatmulPreference_t, &Library::cublasLtMatmulPreferenceDestroy>>;

cudaDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    case DType::kI8:
      return CUDA_R_8I;
    default:
      return CUDA_R_32F;
  }
}

// The largest power of two up to 256 that divides an address and a stride of rows.
uint32_t AlignmentOf(const void* data, int64_t stride, DType dtype) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(stride) * SizeOf(dtype) | 256u;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// The library counts columns first, so all is seen transposed: out^T [n, rows] = W [n, k] x^T, with
// W read as the transpose of a [k, n] matrix. Both inputs then run along k, the layout that every
// architecture's tensor cores take.
struct Problem {
  Operation operation;
  Layout weights;  // [k, n]
  Layout x;        // [k, rows]
  Layout out;      // [n, rows]
};

template <typename T>
bool Set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  return Lib().cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)) ==
         CUBLAS_STATUS_SUCCESS;
}
template <typename T>
bool Set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         T value) {
  return Lib().cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)) ==
         CUBLAS_STATUS_SUCCESS;
}

bool MakeLayout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t stride, Layout& layout) {
  cublasLtMatrixLayout_t raw = nullptr;
  if (Lib().cublasLtMatrixLayoutCreate(&raw, type, static_cast<uint64_t>(rows),
                                       static_cast<uint64_t>(cols),
                                       stride) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  layout.reset(raw);
  return true;
}

bool MakeProblem(const LibraryProduct& product, int64_t rows, Problem& problem) {
  cublasLtMatmulDesc_t operation = nullptr;
  const bool int8 = product.dtype == DType::kI8;
  const cudaDataType_t sums = int8 ? CUDA_R_32I : CUDA_R_32F;
  // 32F never uses TF32; only the FAST modes do.
  if (Lib().cublasLtMatmulDescCreate(&operation, int8 ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F,
                                     sums) != CUBLAS_STATUS_SUCCESS) {
    return false;
  }
  problem.operation.reset(operation);
  bool ok = Set(operation, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T) &&
            Set(operation, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  if (product.bias != nullptr) {
    ok = ok && Set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS) &&
         Set(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_32F) &&
         Set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(product.bias));
  }
  return ok &&
         MakeLayout(TypeOf(product.dtype), product.k, product.n, product.weight_stride,
                    problem.weights) &&
         MakeLayout(TypeOf(product.dtype), product.k, rows, product.x_stride, problem.x) &&
         MakeLayout(sums, product.n, rows, product.out_stride, problem.out);
}

// The properties that decide which algorithms can run.
using Key = std::tuple<int64_t, int64_t, int64_t, DType, bool, bool, uint32_t, uint32_t>;

class RealCublasLt final : public CublasLt {
 public:
  RealCublasLt(Device& device, Handle handle, Buffer workspace)
      : device_(device), handle_(std::move(handle)), workspace_(std::move(workspace)) {}

  bool Multiply(const LibraryProduct& product) override {
    const bool int8 = product.dtype == DType::kI8;
    TREADLE_CHECK(!int8 || (product.bias == nullptr && !product.accumulate));
    const std::optional<cublasLtMatmulAlgo_t>& algorithm = AlgorithmFor(product);
    Problem problem;
    if (!algorithm.has_value() || !MakeProblem(product, product.rows, problem)) return false;
    const float factors[] = {1, product.accumulate ? 1.0f : 0.0f};
    const int32_t integers[] = {1, 0};
    const void* alpha = int8 ? static_cast<const void*>(&integers[0]) : &factors[0];
    const void* beta = int8 ? static_cast<const void*>(&integers[1]) : &factors[1];
    // A failure of the device itself stays there, and Device::status tells of it.
    return Lib().cublasLtMatmul(handle_.get(), problem.operation.get(), alpha, product.weights,
                                problem.weights.get(), product.x, problem.x.get(), beta,
                                product.out, problem.out.get(), product.out, problem.out.get(),
                                &*algorithm, workspace_.data(), workspace_.bytes(),
                                static_cast<cudaStream_t>(device_.stream())) ==
           CUBLAS_STATUS_SUCCESS;
  }

 private:
  const std::optional<cublasLtMatmulAlgo_t>& AlgorithmFor(const LibraryProduct& product) {
    const uint32_t x_alignment = AlignmentOf(product.x, product.x_stride, product.dtype);
    const uint32_t out_alignment = AlignmentOf(product.out, product.out_stride, DType::kF32);
    const Key key{product.n,
                  product.k,
                  RowBucket(product.rows),
                  product.dtype,
                  product.bias != nullptr,
                  product.accumulate,
                  x_alignment,
                  out_alignment};
    auto [entry, added] = algorithms_.try_emplace(key);
    if (added) entry->second = Choose(product, x_alignment, out_alignment);
    return entry->second;
  }

  std::optional<cublasLtMatmulAlgo_t> Choose(const LibraryProduct& product, uint32_t x_alignment,
                                             uint32_t out_alignment) {
    Problem problem;
    cublasLtMatmulPreference_t raw = nullptr;
    if (!MakeProblem(product, RowBucket(product.rows), problem) ||
        Lib().cublasLtMatmulPreferenceCreate(&raw) != CUBLAS_STATUS_SUCCESS) {
      return std::nullopt;
    }
    const Preference preference(raw);
    const uint32_t weight_alignment =
        AlignmentOf(product.weights, product.weight_stride, product.dtype);
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const bool ok =
        Set(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{workspace_.bytes()}) &&
        Set(raw, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, weight_alignment) &&
        Set(raw, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x_alignment) &&
        Set(raw, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment) &&
        Set(raw, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment) &&
        Lib().cublasLtMatmulAlgoGetHeuristic(
            handle_.get(), problem.operation.get(), problem.weights.get(), problem.x.get(),
            problem.out.get(), problem.out.get(), raw, 1, &result, &found) == CUBLAS_STATUS_SUCCESS;
    if (!ok || found == 0 || result.state != CUBLAS_STATUS_SUCCESS) return std::nullopt;
    return result.algo;
  }

  Device& device_;
  const Handle handle_;
  const Buffer workspace_;
  std::map<Key, std::optional<cublasLtMatmulAlgo_t>> algorithms_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CublasLt>> CublasLt::Create(Device& device) {
  TREADLE_RETURN_IF_ERROR(TheLibrary().status());
  device.BindThread();
  cublasLtHandle_t raw = nullptr;
  const cublasStatus_t status = Lib().cublasLtCreate(&raw);
  if (status != CUBLAS_STATUS_SUCCESS) {
    return Internal("cuBLASLt on ", device.properties().name,
                    ": cublasLtCreate: ", Lib().cublasLtGetStatusString(status));
  }
  Handle handle(raw);
  TREADLE_ASSIGN_OR_RETURN(Buffer workspace, device.Allocate(kWorkspaceBytes));
  return std::unique_ptr<CublasLt>(
      new RealCublasLt(device, std::move(handle), std::move(workspace)));
}

}  // namespace treadle::cuda
