// Random company with a model whose logits are a hash of exactly the tokens it should see.
#include "tests/engine/company/company.h"

#include <gtest/gtest.h>

#include "kernels/reference/reference_backend.h"
#include "tests/support/prefix_model.h"

namespace treadle {
namespace {

RankFactory PrefixRank() {
  return {[] { return CreateReferenceBackend(); },
          [](Backend&) { return std::make_unique<PrefixModel>(); }};
}

class Company : public ::testing::TestWithParam<int> {};  // depth

TEST_P(Company, DoesNotMatter) {
  for (uint32_t seed = 0; seed < 12; ++seed) {
    // 128 tokens at most per request, so that the reference holds a whole one; pages for about six.
    const LocalEngineOptions options{.max_batch_tokens = seed % 2 == 0 ? 128 : 192,
                                     .page_size = seed % 3 == 0 ? 32 : 16,
                                     .kv_pages = 48,
                                     .kv_dtype = DType::kF32,
                                     .depth = GetParam()};
    ExpectCompanyDoesNotMatter(PrefixRank(), options, RandomRequests(seed, 16, 50, 90, 24), seed);
  }
}

INSTANTIATE_TEST_SUITE_P(Depths, Company, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace treadle
