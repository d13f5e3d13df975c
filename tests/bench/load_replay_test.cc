// Replaying a trace against a target that does what a test wants: what is sent when, and what of it
// the client itself was late with.
#include "bench/load/load_replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace treadle {
namespace {

using testing::Each;
using testing::Ge;

// Answers nothing until it has been sent so many requests; each answer is one token.
class LateTarget final : public LoadTarget {
 public:
  explicit LateTarget(size_t requests) : requests_(requests) {}
  absl::StatusOr<Limits> GetLimits(std::chrono::seconds) override { return Limits{4096, 1000}; }
  void Send(LoadRequest request, LoadAnswer& answer) override {
    std::this_thread::sleep_for(in_send);
    answer.sent();
    prompts.push_back(std::move(request.token_ids));
    waiting_.push_back(&answer);
    if (prompts.size() < requests_) return;
    for (LoadAnswer* each : std::exchange(waiting_, {})) {
      each->received(1, {});
      each->ended("");
    }
  }

  std::vector<std::vector<int32_t>> prompts;
  std::chrono::milliseconds in_send{0};

 private:
  const size_t requests_;
  std::vector<LoadAnswer*> waiting_;
};

TEST(Replay, NeverWaitsWithSendingForAServer) {
  LateTarget target(30);
  std::vector<TraceEntry> trace;
  for (int i = 0; i < 30; ++i) trace.push_back({i * 1e-3, 4, 1});
  const auto result = Replay(trace, target, {});
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 0; i < trace.size(); ++i) {
    const LoadRecord& record = result->requests[i];
    EXPECT_EQ(record.scheduled, trace[i].arrival);
    EXPECT_EQ(record.error, "");
    // Whoever came first has waited for the last one: latency is from the scheduled arrival on.
    EXPECT_GE(record.token_times.front() - record.scheduled, 29e-3 - trace[i].arrival);
  }
}

// Sending takes 5 ms, and requests come faster: the client is late, and says so.
TEST(Replay, ItsOwnLatenessIsTold) {
  LateTarget target(10);
  target.in_send = std::chrono::milliseconds(5);
  const auto result = Replay(std::vector<TraceEntry>(10, TraceEntry{0, 4, 1}), target, {});
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 0; i < 10; ++i) {
    const double least = static_cast<double>(i + 1) * 5e-3;
    EXPECT_GE(result->requests[i].lag, least);
    EXPECT_GE(result->requests[i].sent, least);
    EXPECT_EQ(result->requests[i].scheduled, 0);
  }
}

// Waiting for a place is what the user wanted.
TEST(Replay, WaitingForMaxConcurrencyIsNoLateness) {
  LateTarget target(1);
  target.in_send = std::chrono::milliseconds(5);
  const auto result =
      Replay(std::vector<TraceEntry>(10, TraceEntry{0, 4, 1}), target, {.max_concurrency = 1});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GE(result->requests[9].sent, 50e-3);
  std::vector<double> late;
  for (const LoadRecord& record : result->requests) late.push_back(record.sent - record.lag);
  EXPECT_TRUE(std::ranges::is_sorted(late));
  EXPECT_GE(late[9], 45e-3);
}

std::vector<int32_t> Part(const std::vector<int32_t>& ids, size_t from, size_t to) {
  return {ids.begin() + static_cast<ptrdiff_t>(from), ids.begin() + static_cast<ptrdiff_t>(to)};
}

TEST(Replay, PromptsShareTheBlocksOfTheirTrace) {
  const std::vector<TraceEntry> trace = {{0, 1100, 1, -1, {7, 8, 9}},
                                         {0, 1300, 1, -1, {7, 8, 10}},
                                         {0, 600, 1, -1, {8, 7}},
                                         {0, 600, 1}};
  const auto prompts = [&](uint64_t seed) {
    LateTarget target(4);
    EXPECT_TRUE(Replay(trace, target, {.seed = seed}).ok());
    return target.prompts;
  };
  const auto sent = prompts(1);
  for (size_t i = 0; i < trace.size(); ++i) EXPECT_EQ(std::ssize(sent[i]), trace[i].input_tokens);
  EXPECT_EQ(Part(sent[0], 0, 1024), Part(sent[1], 0, 1024));
  EXPECT_NE(Part(sent[0], 1024, 1100), Part(sent[1], 1024, 1100));
  EXPECT_EQ(Part(sent[0], 512, 1024), Part(sent[2], 0, 512));
  EXPECT_NE(Part(sent[3], 0, 512), Part(sent[2], 0, 512));
  EXPECT_EQ(sent, prompts(1));
  EXPECT_NE(sent[0], prompts(2)[0]);
  for (const auto& prompt : sent)
    EXPECT_THAT(prompt, Each(testing::AllOf(Ge(0), testing::Lt(1000))));
}

TEST(Replay, TheTextOfATraceIsSentAndMustBeTheModels) {
  LateTarget target(1);
  EXPECT_TRUE(Replay({{0, 3, 1, -1, {}, {5, 6, 999}}}, target, {}).ok());
  EXPECT_THAT(target.prompts.at(0), testing::ElementsAre(5, 6, 999));
  const auto other = Replay({{0, 3, 1, -1, {}, {5, 6, 1000}}}, target, {});
  EXPECT_THAT(other.status().ToString(), testing::HasSubstr("its tokenizer is another one"));
}

}  // namespace
}  // namespace treadle
