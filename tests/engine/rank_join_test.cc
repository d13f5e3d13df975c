// Ranks that bring communicators of their own, as those on GPUs do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "tests/engine/engine_kinds.h"
#include "tests/engine/two_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/thread_groups.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

class RankJoins : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(auto written, WriteTinyLlamaGguf(folder_.path(), {}));
    model_ = written;
  }

  std::unique_ptr<Engine> Make(RankJoiner join) const {
    return MakeEngine({.ranks = 2}, model_,
                      {.max_batch_tokens = 64,
                       .page_size = 16,
                       .kv_pages = 24,
                       .kv_dtype = DType::kF32,
                       .join = std::move(join)});
  }

  const TestFolder folder_;
  std::string model_;
};

TEST_F(RankJoins, EveryEpochHasNewOnes) {
  ThreadGroups groups;
  EngineRunner own(Make([&](const RankJoin& join) { return groups.Join(join); }));
  EngineRunner usual(Make({}));
  ExpectSameResults(RunPlans(usual, TwoRequests()), RunPlans(own, TwoRequests()));
  own.engine().Restart();
  own.WaitForRoom();
  EXPECT_EQ(groups.size(), 2u);
}

TEST_F(RankJoins, OneThatCannotJoinIsAnErrorForAll) {
  auto engine = Make([&](const RankJoin& join) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    if (join.rank == 0) return absl::UnavailableError("no link");
    return join.rendezvous.Get("never", std::chrono::steady_clock::now() + join.timeout).status();
  });
  const absl::Status status = engine->Start([] {});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("no link"));
}

}  // namespace
}  // namespace treadle
