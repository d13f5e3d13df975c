// One iteration ahead of the host (docs/design.md, The plan: the previous sample), on a device that
// is asynchronous where the engine can notice.
#include <gtest/gtest.h>

#include "engine/local_engine.h"
#include "kernels/reference/reference_backend.h"
#include "tests/engine/two_requests.h"
#include "tests/support/deferred_backend.h"
#include "tests/support/random_model.h"
#include "tests/support/ranks/one_rank.h"

namespace treadle {
namespace {

std::unique_ptr<EngineRunner> Start(int depth, std::unique_ptr<Backend> backend) {
  auto model = std::make_unique<RandomModel>(*backend, *FindWeightFormat("f32"), 64, 1);
  auto engine = OneRankEngine(std::move(backend), std::move(model),
                              {.max_batch_tokens = 64,
                               .page_size = 16,
                               .kv_pages = 24,
                               .kv_dtype = DType::kF32,
                               .depth = depth});
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::make_unique<EngineRunner>(*std::move(engine));
}

// The device is given the next plan before the host has seen the samples of the one before it, and
// they are the same samples.
TEST(Ahead, AnAsynchronousDeviceHasTheNextPlanAlready) {
  const auto expected = RunPlans(*Start(1, CreateReferenceBackend()), TwoRequests());
  auto counts = std::make_shared<DeferredBackend::Counts>();
  auto runner = Start(2, std::make_unique<DeferredBackend>(CreateReferenceBackend(), counts));
  const auto ahead = RunPlans(*runner, TwoRequests());
  ExpectSameResults(expected, ahead);
  EXPECT_EQ(counts->most_on_their_way, 2);
  EXPECT_GT(counts->replays, 0);
}

}  // namespace
}  // namespace treadle
