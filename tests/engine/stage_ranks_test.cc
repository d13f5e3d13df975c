// Work in the background of a stage's rank: plans come first, and several take turns.
#include "engine/stage_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>

#include "base/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using ::testing::ElementsAre;

std::unique_ptr<StageRanks> TinyRanks() {
  const auto checkpoint = Checkpoint::Open(*WriteTinyLlamaGguf(OwnFolder().path(), {}));
  StageRanks::Rank rank;
  rank.backend = *CreateCpuBackend({.threads = 1});
  LoadOptions load;
  load.max_batch_tokens = 16;
  rank.model = *Model::Load(**checkpoint, *rank.backend, load);
  std::vector<StageRanks::Rank> ranks;
  ranks.push_back(std::move(rank));
  return StageRanks::Create(std::move(ranks), {.max_batch_tokens = 16, .kv = {.num_pages = 1}})
      .value();
}

TEST(StageRanks, BackgroundYieldsToPlans) {
  std::vector<std::string> order;  // the rank's thread's, until it ends
  std::promise<void> ready, begun, go, last;
  const auto ranks = TinyRanks();
  const auto background = [&](const char* name, std::promise<void>* end) {
    return [&order, name, end, turns = 0]() mutable {
      order.push_back(name);
      if (++turns < 3) return true;
      if (end != nullptr) end->set_value();
      return false;
    };
  };
  ASSERT_TRUE(ranks
                  ->Start({.done =
                               [&](uint64_t, const absl::StatusOr<IterationResult>& result) {
                                 order.push_back(result.ok() ? "plan" : "failure");
                               },
                           .ready = [&](uint64_t) { ready.set_value(); }})
                  .ok());
  ranks->BeginEpoch(1, {});
  ready.get_future().wait();
  ranks->AddBackground([&] {  // holds the thread until all else is there
    begun.set_value();
    go.get_future().wait();
    return false;
  });
  begun.get_future().wait();
  ranks->AddBackground(background("a", nullptr));
  ranks->AddBackground(background("b", &last));
  IterationPlan plan;
  plan.epoch = 1;
  ranks->Submit(plan);
  go.set_value();
  last.get_future().wait();
  EXPECT_THAT(order, ElementsAre("plan", "a", "b", "a", "b", "a", "b"));
}

TEST(StageRanks, DropsWhatIsLeftInTheBackground) {
  const auto held = std::make_shared<int>(0);
  {
    const auto ranks = TinyRanks();
    ASSERT_TRUE(ranks->Start({.done = [](auto, const auto&) {}, .ready = [](auto) {}}).ok());
    ranks->AddBackground([held] { return ++*held > 0; });  // for ever
    std::promise<void> turn;
    ranks->AddBackground([&] { return turn.set_value(), false; });
    turn.get_future().wait();
  }
  EXPECT_GT(*held, 0);
  EXPECT_EQ(held.use_count(), 1);
}

}  // namespace
}  // namespace treadle
