// The load against a serving loop of this process, with an engine that checks every plan.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "bench/load/load_replay.h"
#include "engine/kv/kv_slot_manager.h"
#include "scheduler/ledger.h"
#include "scheduler/policy.h"
#include "scheduler/serving_loop.h"
#include "tests/support/fake_engine.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kPageSize = 4;
constexpr int64_t kPages = 256;
constexpr LoadTarget::Limits kLimits = {.max_context = 64, .vocab = 64};

// A loop that turns on its own thread.
class Serving {
 public:
  explicit Serving(const std::string& policy, int64_t max_queue = 1000)
      : engine_({.depth = 2, .page_size = kPageSize, .total_pages = kPages}),
        kv_(kPages, kPageSize),
        pool_(max_queue),
        policy_(*Policy::Create(policy)) {
    ServingLoop::Options options;
    options.limits = {.max_batch_size = 4, .max_batch_tokens = 16};
    loop_ = std::make_unique<ServingLoop>(engine_, kv_, pool_, *policy_, ledger_,
                                          TimeSource::Steady(), options);
  }
  void Start() { ASSERT_TRUE(loop_->Start().ok()); }
  void Stop() { loop_->Stop(absl::UnavailableError("the test is over")); }
  RequestPool& pool() { return pool_; }
  FakeEngine& engine() { return engine_; }

 private:
  FakeEngine engine_;
  KvSlotManager kv_;
  RequestPool pool_;
  const std::unique_ptr<Policy> policy_;
  Ledger ledger_;
  std::unique_ptr<ServingLoop> loop_;
};

std::vector<TraceEntry> Trace(int64_t requests) {
  SyntheticTrace trace;
  trace.num_requests = requests;
  trace.request_rate = 5000;
  trace.input = {1, 40};
  trace.output = {1, 24};
  return MakeTrace(trace);
}

class LocalLoad : public testing::TestWithParam<const char*> {};

TEST_P(LocalLoad, EveryRequestGetsAllItsTokensInOrder) {
  Serving serving(GetParam());
  serving.Start();
  const auto target = LoadInProcess(serving.pool(), kLimits, {});
  const std::vector<TraceEntry> trace = Trace(200);
  double done = 0;
  const auto result = Replay(trace, *target, {.progress = [&](double now) {
                               EXPECT_GE(now, done);
                               done = now;
                             }});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(done, 1);
  ASSERT_EQ(result->requests.size(), trace.size());
  for (size_t i = 0; i < trace.size(); ++i) {
    const LoadRecord& request = result->requests[i];
    EXPECT_EQ(request.error, "");
    EXPECT_EQ(request.scheduled, trace[i].arrival);
    EXPECT_EQ(request.input_tokens, trace[i].input_tokens);
    EXPECT_EQ(request.output_tokens, trace[i].output_tokens);
    ASSERT_EQ(std::ssize(request.token_times), trace[i].output_tokens);
    EXPECT_TRUE(std::ranges::is_sorted(request.token_times));
    EXPECT_GE(request.token_times.front(), request.scheduled);
    EXPECT_GE(request.end, request.token_times.back());
    EXPECT_LE(request.end, result->duration);
  }
  serving.Stop();
  EXPECT_THAT(serving.engine().violations(), IsEmpty());
}

TEST_P(LocalLoad, OneAtATimeNeverOverlaps) {
  Serving serving(GetParam());
  serving.Start();
  const auto target = LoadInProcess(serving.pool(), kLimits, {});
  const auto result = Replay(Trace(30), *target, {.max_concurrency = 1});
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 1; i < result->requests.size(); ++i) {
    EXPECT_EQ(result->requests[i].error, "");
    EXPECT_GE(result->requests[i].token_times.front(), result->requests[i - 1].end);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, LocalLoad, testing::Values("fcfs", "request-level"));

TEST(LocalLoadErrors, ARefusedRequestEndsWithItsReason) {
  Serving serving("fcfs", /*max_queue=*/2);  // whose loop does not turn yet
  const auto target = LoadInProcess(serving.pool(), kLimits, {});
  std::vector<TraceEntry> trace(5, TraceEntry{0, 3, 2});
  trace.push_back({0.2, 3, 2});
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    serving.Start();
  });
  const auto result = Replay(trace, *target, {});
  later.join();
  ASSERT_TRUE(result.ok()) << result.status();
  for (const size_t taken : {0, 1, 5}) EXPECT_EQ(result->requests[taken].error, "") << taken;
  for (const size_t refused : {2, 3, 4}) {
    EXPECT_THAT(result->requests[refused].error, HasSubstr("code 8: "));
    EXPECT_THAT(result->requests[refused].token_times, IsEmpty());
  }
}

TEST(LocalLoadErrors, ATraceBeyondTheContextIsRefusedAsAWhole) {
  Serving serving("fcfs");
  const auto target = LoadInProcess(serving.pool(), kLimits, {});
  const auto result = Replay({{0, 60, 4}, {0, 60, 5}}, *target, {});
  ASSERT_FALSE(result.ok());
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("60 + 5 tokens"));
}

TEST(LocalLoadErrors, ADeadlineEndsARequest) {
  Serving serving("fcfs");
  serving.Start();
  const auto target = LoadInProcess(serving.pool(), kLimits, {});
  const auto result = Replay({{0, 3, 2}}, *target, {.request_timeout = std::chrono::seconds(0)});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->requests[0].error, HasSubstr("code 4: "));
}

TEST(LocalLoadErrors, AnEndTokenEndsARequestThatDoesNotIgnoreIt) {
  Serving serving("fcfs");
  serving.Start();
  std::vector<int32_t> any_token(64);
  for (int32_t i = 0; i < 64; ++i) any_token[i] = i;
  const auto target = LoadInProcess(serving.pool(), kLimits, any_token);
  const auto one = Replay({{0, 3, 9}}, *target, {.ignore_eos = false});
  const auto all = Replay({{0, 3, 9}}, *target, {.ignore_eos = true});
  ASSERT_TRUE(one.ok() && all.ok());
  EXPECT_EQ(one->requests[0].output_tokens, 1);
  EXPECT_EQ(all->requests[0].output_tokens, 9);
}

}  // namespace
}  // namespace treadle
