#include "engine/local_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/sync.h"
#include "kernels/reference/reference_backend.h"
#include "tests/engine/engine_runner.h"
#include "tests/engine/plan_builder.h"
#include "tests/engine/two_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"
#include "tests/support/prefix_model.h"
#include "tests/support/ranks/one_rank.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

// Lets the rank thread into its forward pass, and out of it when the test says so.
class Gate {
 public:
  void Pass() {  // rank thread
    MutexLock lock(mutex_);
    entered_ = true;
    changed_.NotifyAll();
    const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
    while (!open_) TREADLE_CHECK(changed_.WaitUntil(mutex_, deadline) || open_);
  }
  void WaitUntilEntered() {
    MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + kTestPatience;
    while (!entered_) TREADLE_CHECK(changed_.WaitUntil(mutex_, deadline) || entered_);
  }
  void Open() {
    MutexLock lock(mutex_);
    open_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool entered_ ABSL_GUARDED_BY(mutex_) = false;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
};

LocalEngineOptions SmallOptions(int depth) {
  return {.max_batch_tokens = 64,
          .page_size = 16,
          .kv_pages = 24,
          .kv_dtype = DType::kF32,
          .depth = depth};
}

std::unique_ptr<EngineRunner> StartEngine(const LocalEngineOptions& options,
                                          std::function<void()> before_forward = nullptr) {
  auto model = std::make_unique<PrefixModel>();
  model->before_forward = std::move(before_forward);
  auto engine = OneRankEngine(CreateReferenceBackend(), std::move(model), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::make_unique<EngineRunner>(*std::move(engine));
}

IterationPlan OneRequest(uint64_t epoch, uint64_t iteration, SequenceId id = 1) {
  return PlanOf(epoch, iteration)
      .Start(StartOf(id, 3, {0}))
      .Step(SampleOf(StepOf(id, 0, {1, 2, 3})));
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(LocalEngine, RunsPlansInOrder) {
  auto runner = StartEngine(SmallOptions(2));
  Engine& engine = runner->engine();
  EXPECT_EQ(engine.stages(), 1);
  EXPECT_EQ(engine.depth(), 2);
  const uint64_t epoch = engine.epoch();
  ASSERT_TRUE(engine.HasRoom());
  engine.Submit(OneRequest(epoch, 0));
  ASSERT_TRUE(engine.HasRoom());
  engine.Submit(PlanOf(epoch, 1).Step(SampleOf(PreviousSample(1, 3))));
  EXPECT_FALSE(engine.HasRoom());
  const IterationResult first = runner->Next();
  const IterationResult second = runner->Next();
  EXPECT_EQ(first.iteration, 0u);
  EXPECT_EQ(second.iteration, 1u);
  EXPECT_GE(second.steps[0].token(), 0);
  EXPECT_GT(first.timings.compute, 0);
  EXPECT_GT(first.timings.sample, 0);
  EXPECT_GE(first.timings.queue, 0);
  EXPECT_TRUE(engine.HasRoom());
  EXPECT_TRUE(engine.TakeResults().empty());
  EXPECT_EQ(engine.status(), absl::OkStatus());
}

TEST(LocalEngine, HasNoRoomBeforeItsStart) {
  ASSERT_OK_AND_ASSIGN(
      auto engine,
      OneRankEngine(CreateReferenceBackend(), std::make_unique<PrefixModel>(), SmallOptions(1)));
  EXPECT_FALSE(engine->HasRoom());
}

// A finished plan stays in flight until its result was taken.
TEST(LocalEngine, RoomComesWithTakingResults) {
  auto runner = StartEngine(SmallOptions(1));
  runner->engine().Submit(OneRequest(runner->engine().epoch(), 0));
  runner->WaitForNews();
  EXPECT_FALSE(runner->engine().HasRoom());
  EXPECT_EQ(runner->engine().TakeResults().size(), 1u);
  EXPECT_TRUE(runner->engine().HasRoom());
}

TEST(LocalEngine, HeartbeatsComeBackEmpty) {
  auto runner = StartEngine(SmallOptions(1), [] { FAIL() << "the model was touched"; });
  for (uint64_t i = 0; i < 3; ++i) {
    runner->engine().Submit(PlanOf(runner->engine().epoch(), i));
    EXPECT_EQ(runner->Next().iteration, i);
  }
}

TEST(LocalEngine, ABadPlanEndsTheEpochAndRestartRecovers) {
  auto runner = StartEngine(SmallOptions(2));
  Engine& engine = runner->engine();
  const uint64_t epoch = engine.epoch();
  engine.Submit(OneRequest(epoch, 0));
  runner->Next();
  engine.Submit(PlanOf(epoch, 1).Step(StepOf(77, 0, {1})));
  runner->WaitForError();
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Message(engine.status()), "iteration 1 of epoch 1: step of unknown sequence 77");
  EXPECT_FALSE(engine.HasRoom());
  engine.Submit(PlanOf(epoch, 2));  // the epoch is over: ignored
  EXPECT_TRUE(engine.TakeResults().empty());

  engine.Restart();
  runner->WaitForRoom();
  EXPECT_EQ(engine.status(), absl::OkStatus());
  EXPECT_EQ(engine.epoch(), epoch + 1);
  engine.Submit(OneRequest(epoch + 1, 0));  // the same id again: the table is empty
  EXPECT_EQ(runner->Next().epoch, epoch + 1);
}

TEST(LocalEngine, PlansOfAnotherEpochOrOutOfOrderEndTheEpoch) {
  auto runner = StartEngine(SmallOptions(2));
  Engine& engine = runner->engine();
  engine.Submit(PlanOf(engine.epoch() + 5, 0));
  EXPECT_EQ(Message(engine.status()),
            "plan of epoch 6, iteration 0; expected epoch 1, iteration 0");
  engine.Restart();
  runner->WaitForRoom();
  engine.Submit(PlanOf(engine.epoch(), 0));
  engine.Submit(PlanOf(engine.epoch(), 2));
  EXPECT_THAT(Message(engine.status()), HasSubstr("expected epoch 2, iteration 1"));
  EXPECT_TRUE(engine.TakeResults().empty());  // nothing more of that epoch
}

TEST(LocalEngine, RestartDropsWhatIsUnderWay) {
  Gate gate;
  auto runner = StartEngine(SmallOptions(2), [&] { gate.Pass(); });
  Engine& engine = runner->engine();
  engine.Submit(OneRequest(engine.epoch(), 0));
  gate.WaitUntilEntered();
  engine.Submit(PlanOf(engine.epoch(), 1).Start(StartOf(2, 3, {1})));
  engine.Restart();
  EXPECT_FALSE(engine.HasRoom());  // the rank thread is still in the old epoch
  gate.Open();
  runner->WaitForRoom();
  EXPECT_TRUE(engine.TakeResults().empty());
  // Neither the plan that ran nor the one that waited left a sequence behind.
  engine.Submit(PlanOf(engine.epoch(), 0).Start(StartOf(1, 3, {0})).Start(StartOf(2, 3, {1})));
  EXPECT_EQ(runner->Next().epoch, engine.epoch());
}

TEST(LocalEngine, ALateIterationEndsTheEpoch) {
  Gate gate;
  LocalEngineOptions options = SmallOptions(2);
  // Not less: the iteration after the late one has to be in time on a busy machine, too.
  options.iteration_deadline = std::chrono::seconds(2);
  auto runner = StartEngine(options, [&] { gate.Pass(); });
  Engine& engine = runner->engine();
  engine.Submit(OneRequest(engine.epoch(), 0));
  gate.WaitUntilEntered();
  std::this_thread::sleep_for(std::chrono::milliseconds(2010));  // let the deadline pass
  EXPECT_EQ(engine.status(), absl::OkStatus());                  // looking changes nothing
  EXPECT_TRUE(engine.HasRoom());
  EXPECT_TRUE(engine.TakeResults().empty());
  EXPECT_FALSE(engine.HasRoom());
  EXPECT_EQ(engine.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Message(engine.status()), "iteration 0 of epoch 1 runs longer than 2000 ms");
  gate.Open();
  engine.Restart();
  runner->WaitForRoom();
  EXPECT_TRUE(engine.TakeResults().empty());  // the late result was dropped
  engine.Submit(PlanOf(engine.epoch(), 0));
  EXPECT_EQ(runner->Next().epoch, engine.epoch());
}

// Nobody asks while the iteration is late: its return is noticed all the same.
TEST(LocalEngine, ALateIterationIsNoticedWhenItReturns) {
  LocalEngineOptions options = SmallOptions(1);
  options.iteration_deadline = std::chrono::milliseconds(5);
  auto runner =
      StartEngine(options, [] { std::this_thread::sleep_for(std::chrono::milliseconds(10)); });
  runner->engine().Submit(OneRequest(runner->engine().epoch(), 0));
  runner->WaitForNews();
  EXPECT_TRUE(runner->engine().TakeResults().empty());
  EXPECT_EQ(runner->engine().status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(LocalEngine, TheDestructorWaitsForTheRunningIteration) {
  Gate gate;
  auto runner = StartEngine(SmallOptions(2), [&] { gate.Pass(); });
  runner->engine().Submit(OneRequest(runner->engine().epoch(), 0));
  runner->engine().Submit(PlanOf(runner->engine().epoch(), 1).Release(1));
  gate.WaitUntilEntered();
  std::thread opener([&] { gate.Open(); });
  RunInTime([&] { runner.reset(); });
  opener.join();
}

TEST(LocalEngine, OptionsOutOfRangeAreNamed) {
  const auto message = [](const LocalEngineOptions& options) {
    return Message(
        OneRankEngine(CreateReferenceBackend(), std::make_unique<PrefixModel>(), options).status());
  };
  LocalEngineOptions options = SmallOptions(0);
  EXPECT_THAT(message(options), HasSubstr("engine depth is 0"));
  options = SmallOptions(1);
  options.kv_pages = 0;
  EXPECT_THAT(message(options), HasSubstr("number of pages is 0"));
  options = SmallOptions(1);
  options.iteration_deadline = std::chrono::milliseconds(0);
  EXPECT_THAT(message(options), HasSubstr("iteration deadline is 0"));
}

// The same plans give the same stream of results whether the host waits for each or not.
TEST(LocalEngine, DepthTwoGivesTheResultsOfDepthOne) {
  const auto run = [](int depth) {
    return RunPlans(*StartEngine(SmallOptions(depth)), TwoRequests());
  };
  ExpectSameResults(run(1), run(2));
}

}  // namespace
}  // namespace treadle
