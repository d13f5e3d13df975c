// Random company with real attention: every weight format, every compute mode, every type of cache,
// one and several threads. On the CPU backend this is N1 and N2 end to end; the reference shows
// that the engine keeps them when every op is plain.
#include <gtest/gtest.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference/reference_backend.h"
#include "tests/engine/company/company.h"
#include "tests/support/random_model.h"

namespace treadle {
namespace {

constexpr int64_t kMaxBatchTokens = 160;

std::unique_ptr<Backend> CpuWith(int threads, ComputeMode compute) {
  CpuBackendOptions options;
  options.threads = threads;
  options.compute = compute;
  auto backend = CreateCpuBackend(options);
  TREADLE_CHECK(backend.ok());
  return *std::move(backend);
}

void Expect(std::function<std::unique_ptr<Backend>()> backend, const WeightFormat& format,
            DType kv_dtype, uint32_t seed, int requests) {
  SCOPED_TRACE(format.name);
  const RankFactory rank{std::move(backend), [&format](Backend& made) {
                           return std::make_unique<RandomModel>(made, format, kMaxBatchTokens, 5);
                         }};
  const LocalEngineOptions options{.max_batch_tokens = kMaxBatchTokens,
                                   .page_size = seed % 2 == 0 ? 16 : 32,
                                   .kv_pages = 48,
                                   .kv_dtype = kv_dtype};
  ExpectCompanyDoesNotMatter(rank, options, RandomRequests(seed, requests, 97, 130, 16), seed);
}

const WeightFormat& Format(std::string_view name) {
  const WeightFormat* format = FindWeightFormat(name);
  TREADLE_CHECK(format != nullptr);
  return *format;
}

TEST(AttentionCompany, ReferenceBackend) {
  const auto backend = [] { return CreateReferenceBackend(); };
  Expect(backend, Format("f32"), DType::kF32, 1, 5);
  Expect(backend, Format("q8_0"), DType::kF16, 2, 5);
  Expect(backend, Format("q8_0"), DType::kI8, 3, 5);
}

class CpuCompany : public ::testing::TestWithParam<ComputeMode> {};

TEST_P(CpuCompany, EveryFormat) {
  uint32_t seed = 0;
  for (const WeightFormat& format : WeightFormats()) {
    const int threads = seed % 4 == 1 ? 3 : 1;
    const auto backend = [&] { return CpuWith(threads, GetParam()); };
    constexpr DType kCaches[] = {DType::kF32, DType::kF16, DType::kI8};
    Expect(backend, format, kCaches[seed % 3], seed, 5);
    ++seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Compute, CpuCompany,
                         ::testing::Values(ComputeMode::kExact, ComputeMode::kInt8,
                                           ComputeMode::kInt16, ComputeMode::kBf16),
                         [](const auto& info) { return std::string(Name(info.param)); });

}  // namespace
}  // namespace treadle
