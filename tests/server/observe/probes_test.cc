// Answers of the probes, with an engine that does what the test wants.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/observe/health.h"
#include "server/observe/metrics.h"
#include "server/serving_stack.h"
#include "tests/support/assert_ok.h"
#include "tests/support/fake_engine.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kPatience{60};

class Probes : public testing::Test {
 protected:
  void Start(FakeEngineOptions engine, SchedulingOptions scheduling = {},
             LoopWatch::Options watch = {}) {
    ServedModel model;
    model.name = "fake";
    model.vocab = 100;
    model.max_context = 64;
    model.kv_pages = engine.total_pages;
    model.paging.page_size = engine.page_size;
    auto made = std::make_unique<FakeEngine>(engine);
    engine_ = made.get();
    ASSERT_OK_AND_ASSIGN(auto stack,
                         ServingStack::Create(std::move(model), std::move(made), scheduling));
    stack_ = std::move(stack);
    ASSERT_TRUE(stack_->Start().ok());
    watch_ = std::make_unique<LoopWatch>(*stack_, board_, watch);
  }
  bool WaitFor(Probe probe, bool serving) {
    return ComesTrue([&] { return board_.Get(probe) == serving; });
  }
  // Completes plans until it is so.
  bool RunUntil(Probe probe, bool serving) {
    return ComesTrue([&] {
      engine_->Complete();
      return board_.Get(probe) == serving;
    });
  }
  // Time for the watch to look several times.
  void LetItLook() { std::this_thread::sleep_for(milliseconds(200)); }

  HealthBoard board_;
  FakeEngine* engine_ = nullptr;
  std::unique_ptr<ServingStack> stack_;
  std::unique_ptr<LoopWatch> watch_;
};

TEST_F(Probes, ReadyNeedsATokenOutOfTheEngine) {
  Start({.manual = true});
  ASSERT_TRUE(ComesTrue([&] { return engine_->running_plans() > 0; }));
  LetItLook();
  EXPECT_FALSE(board_.Get(Probe::kReady));
  EXPECT_TRUE(board_.Get(Probe::kLive));
  EXPECT_TRUE(RunUntil(Probe::kReady, true));
}

TEST_F(Probes, NotReadyWhileAnEpochIsBeingFormed) {
  Start({.manual_restart = true});
  ASSERT_TRUE(WaitFor(Probe::kReady, true));
  engine_->Fail(absl::UnavailableError("a worker was lost"));
  EXPECT_TRUE(WaitFor(Probe::kReady, false));
  LetItLook();
  EXPECT_FALSE(board_.Get(Probe::kReady));
  EXPECT_TRUE(board_.Get(Probe::kLive));  // never the state of a worker
  engine_->FinishRestart();
  EXPECT_TRUE(WaitFor(Probe::kReady, true));
}

TEST_F(Probes, AWarmUpThatFailsIsTriedAgain) {
  SchedulingOptions scheduling;
  scheduling.recover = false;
  Start({.manual = true, .manual_restart = true}, scheduling);
  ASSERT_TRUE(ComesTrue([&] { return stack_->pool().Load().running == 1; }));
  engine_->Fail(absl::UnavailableError("a worker was lost"));
  ASSERT_TRUE(ComesTrue([&] { return stack_->pool().Load().running == 0; }));
  engine_->FinishRestart();
  LetItLook();
  EXPECT_FALSE(board_.Get(Probe::kReady));
  EXPECT_TRUE(RunUntil(Probe::kReady, true));
}

TEST_F(Probes, AnEngineThatWasGivenUpIsNeverReadyAgain) {
  std::atomic<bool> gave_up = false;
  SchedulingOptions scheduling;
  scheduling.give_up = [&](const absl::Status&) { gave_up = true; };
  Start({}, scheduling);
  ASSERT_TRUE(WaitFor(Probe::kReady, true));
  engine_->Fail(absl::UnavailableError("a worker was lost"));
  EXPECT_TRUE(WaitFor(Probe::kReady, false));
  EXPECT_TRUE(gave_up);
  LetItLook();
  EXPECT_FALSE(board_.Get(Probe::kReady));
  watch_.reset();
  stack_.reset();
}

TEST_F(Probes, DrainingEndsReadinessAndTheWaitingWarmUp) {
  Start({.manual_restart = true});
  ASSERT_TRUE(WaitFor(Probe::kReady, true));
  watch_->Drain();
  EXPECT_FALSE(board_.Get(Probe::kReady));
  LetItLook();
  EXPECT_FALSE(board_.Get(Probe::kReady));
  EXPECT_TRUE(board_.Get(Probe::kLive));
}

TEST_F(Probes, AWarmUpDoesNotHoldADrainUp) {
  Start({.manual = true});
  ASSERT_TRUE(ComesTrue([&] { return stack_->pool().Load().running == 1; }));
  watch_->Drain();
  EXPECT_TRUE(stack_->Drain(Clock::now() + kPatience));
}

TEST_F(Probes, LiveMeansThatTheLoopTurns) {
  Start({.manual = true}, {}, {.loop_patience = milliseconds(400)});
  ASSERT_TRUE(RunUntil(Probe::kReady, true));
  // A loop that waits is live, for as long as one likes.
  std::this_thread::sleep_for(milliseconds(1000));
  EXPECT_TRUE(board_.Get(Probe::kLive));

  Mutex hold;
  {
    MutexLock lock(hold);
    RequestSpec spec;
    spec.prompt = {1};
    spec.max_new_tokens = 2;
    ASSERT_OK_AND_ASSIGN(const auto submitted, stack_->pool().Submit(spec));
    // Something that no notifier may do: it keeps the loop waiting. There is no token yet, so it is
    // not called here.
    submitted.stream->SetNotifier([&] { MutexLock wait(hold); });
    EXPECT_TRUE(RunUntil(Probe::kLive, false));
  }
  EXPECT_TRUE(WaitFor(Probe::kLive, true));
  watch_.reset();
  stack_.reset();  // the notifier is this test's
}

TEST_F(Probes, TheWarmUpIsNoUsersRequest) {
  Start({});
  ASSERT_TRUE(WaitFor(Probe::kReady, true));
  Metrics metrics("fake", stack_->pool());
  uint64_t next = 0;
  uint64_t lost = 0;
  bool seen = false;
  ASSERT_TRUE(ComesTrue([&] {
    for (const auto& record : stack_->ledger().Read(next, 100, lost)) {
      metrics.Record(*record);
      for (const LedgerEnd& end : record->ends) seen |= end.internal && end.client_id == "warm-up";
    }
    return seen;
  }));
  EXPECT_NE(metrics.Scrape().find("treadle:request_success_total{finished_reason=\"length\","
                                  "model_name=\"fake\"} 0"),
            std::string::npos)
      << metrics.Scrape();
}

}  // namespace
}  // namespace treadle
