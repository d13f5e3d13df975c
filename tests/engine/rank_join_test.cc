// Ranks that bring communicators of their own, as those on GPUs do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "kernels/collectives/thread_communicator.h"
#include "tests/engine/engine_kinds.h"
#include "tests/engine/two_requests.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

class RankJoins : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(directory_);
    auto written = WriteTinyLlamaGguf(directory_, {});
    ASSERT_TRUE(written.ok()) << written.status();
    model_ = *written;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::unique_ptr<Engine> Make(RankJoiner join) const {
    return MakeEngine({.ranks = 2}, model_,
                      {.max_batch_tokens = 64,
                       .page_size = 16,
                       .kv_pages = 24,
                       .kv_dtype = DType::kF32,
                       .join = std::move(join)});
  }

  const std::string directory_ = testing::TempDir() + Str("rank-join-", getpid());
  std::string model_;
};

// Thread communicators, handed out by rank 0 to those that find its group.
class Groups {
 public:
  absl::StatusOr<std::unique_ptr<Communicator>> Join(const RankJoin& join) {
    if (join.rank == 0) {
      MutexLock lock(mutex_);
      const std::string name = Str("group ", groups_.size());
      groups_[name] = CreateThreadCommunicators(join.size, join.timeout);
      TREADLE_RETURN_IF_ERROR(join.rendezvous.Set("name", name));
      return std::move(groups_[name][0]);
    }
    TREADLE_ASSIGN_OR_RETURN(
        const std::string name,
        join.rendezvous.Get("name", std::chrono::steady_clock::now() + join.timeout));
    MutexLock lock(mutex_);
    return std::move(groups_[name][join.rank]);
  }
  size_t size() {
    MutexLock lock(mutex_);
    return groups_.size();
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<Communicator>>> groups_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(RankJoins, EveryEpochHasNewOnes) {
  Groups groups;
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
