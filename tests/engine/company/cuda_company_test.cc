// The engine on the emulated CUDA backend: padded batches through captured graphs, one iteration
// ahead of the host, in random company. Every request gets the bits that it gets alone (N1, N2).
#include <gtest/gtest.h>

#include "kernels/cuda/runtime/backend_on_device.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/engine/company/company.h"
#include "tests/support/random_model.h"

namespace treadle {
namespace {

constexpr int64_t kMaxBatchTokens = 64;

std::unique_ptr<Backend> Emulated(DType dtype) {
  auto device = cuda::Device::Open(0);
  TREADLE_CHECK(device.ok());
  auto backend = cuda::MakeCudaBackend(*std::move(device), {.dtype = dtype, .deterministic = true});
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

void Expect(std::string_view format, DType dtype, DType kv_dtype, uint32_t seed) {
  SCOPED_TRACE(format);
  const RankFactory rank{[=] { return Emulated(dtype); },
                         [=](Backend& made) {
                           return std::make_unique<RandomModel>(made, *FindWeightFormat(format),
                                                                kMaxBatchTokens, 5);
                         }};
  const LocalEngineOptions options{.max_batch_tokens = kMaxBatchTokens,
                                   .page_size = 16,
                                   .kv_pages = 48,
                                   .kv_dtype = kv_dtype,
                                   .depth = 2};
  const auto requests =
      kInstrumented ? RandomRequests(seed, 3, 97, 20, 4) : RandomRequests(seed, 4, 97, 40, 8);
  ExpectCompanyDoesNotMatter(rank, options, requests, seed);
}

TEST(CudaCompany, DenseWeights) { Expect("bf16", DType::kBF16, DType::kBF16, 1); }
TEST(CudaCompany, BlockCodes) { Expect("q4_0", DType::kF16, DType::kF16, 2); }
TEST(CudaCompany, Codebooks) { Expect("nf4", DType::kBF16, DType::kF16, 3); }
TEST(CudaCompany, RowInt8) { Expect("int8", DType::kBF16, DType::kF16, 4); }
TEST(CudaCompany, Floats) { Expect("f32", DType::kF32, DType::kF32, 5); }

}  // namespace
}  // namespace treadle
