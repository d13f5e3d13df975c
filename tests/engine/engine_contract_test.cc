// Promises of every Engine (engine/engine.h), on a tiny Llama: the same tests for an engine in
// this process and for one made of worker processes, however many stages and ranks.
#include "tests/engine/engine_contract.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>

#include "base/status.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;

TEST_P(EngineContract, RunsPlansInOrder) {
  EXPECT_EQ(engine().stages(), stages());
  EXPECT_GE(engine().depth(), stages());
  const uint64_t epoch = engine().epoch();
  int submitted = 0;
  for (; engine().HasRoom(); ++submitted) engine().Submit(OneRequest(epoch, submitted, submitted));
  EXPECT_EQ(submitted, engine().depth());
  for (int i = 0; i < submitted; ++i) {
    const IterationResult result = runner_->Next();
    EXPECT_EQ(result.epoch, epoch);
    EXPECT_EQ(result.iteration, static_cast<uint64_t>(i));
    ASSERT_EQ(result.steps.size(), 1u);
    EXPECT_EQ(result.steps[0].sequence, static_cast<SequenceId>(i));
    EXPECT_GE(result.steps[0].token(), 0);
    EXPECT_GT(result.timings.compute, 0);
    if (!GetParam().asynchronous()) {  // else part of compute
      EXPECT_GT(result.timings.sample, 0);
    }
  }
  EXPECT_TRUE(engine().HasRoom());
  EXPECT_TRUE(engine().TakeResults().empty());
  EXPECT_EQ(engine().status(), absl::OkStatus());
}

// A finished plan stays in flight until its result was taken.
TEST_P(EngineContract, RoomComesWithTakingResults) {
  const uint64_t epoch = engine().epoch();
  for (int i = 0; i < engine().depth(); ++i) engine().Submit(OneRequest(epoch, i, i));
  EXPECT_FALSE(engine().HasRoom());
  runner_->Next();
  EXPECT_TRUE(engine().HasRoom());
}

TEST_P(EngineContract, HeartbeatsComeBackEmpty) {
  for (uint64_t i = 0; i < 5; ++i) {
    engine().Submit(PlanOf(engine().epoch(), i));
    const IterationResult result = runner_->Next();
    EXPECT_EQ(result.iteration, i);
    EXPECT_TRUE(result.steps.empty());
  }
}

TEST_P(EngineContract, ABadPlanEndsTheEpochAndRestartRecovers) {
  const uint64_t epoch = engine().epoch();
  engine().Submit(OneRequest(epoch, 0));
  runner_->Next();
  engine().Submit(PlanOf(epoch, 1).Step(StepOf(77, 0, {1})));
  runner_->WaitForError();
  EXPECT_EQ(engine().status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(engine().status()), HasSubstr("step of unknown sequence 77"));
  EXPECT_FALSE(engine().HasRoom());
  engine().Submit(PlanOf(epoch, 2));  // the epoch is over: ignored
  EXPECT_TRUE(engine().TakeResults().empty());

  engine().Restart();
  runner_->WaitForRoom();
  EXPECT_EQ(engine().status(), absl::OkStatus());
  EXPECT_EQ(engine().epoch(), epoch + 1);
  engine().Submit(OneRequest(epoch + 1, 0));  // the same id again: the tables are empty
  EXPECT_EQ(runner_->Next().epoch, epoch + 1);
}

TEST_P(EngineContract, PlansOfAnotherEpochOrOutOfOrderEndTheEpoch) {
  engine().Submit(PlanOf(engine().epoch() + 5, 0));
  EXPECT_THAT(Message(engine().status()), HasSubstr("plan of epoch 6, iteration 0; expected"));
  engine().Restart();
  runner_->WaitForRoom();
  engine().Submit(PlanOf(engine().epoch(), 1));
  EXPECT_THAT(Message(engine().status()), HasSubstr("expected epoch 2, iteration 0"));
  EXPECT_TRUE(engine().TakeResults().empty());
}

TEST_P(EngineContract, RestartDropsWhatIsUnderWay) {
  for (int round = 0; round < 5; ++round) {
    const uint64_t epoch = engine().epoch();
    for (int i = 0; i < engine().depth(); ++i) engine().Submit(OneRequest(epoch, i, i));
    engine().Restart();
    EXPECT_EQ(engine().epoch(), epoch + 1);
    runner_->WaitForRoom();
    EXPECT_TRUE(engine().TakeResults().empty());
  }
}

OutputMask MaskOf(int32_t step, std::initializer_list<int32_t> tokens) {
  OutputMask mask{
      .step = step, .output = 0, .allowed = std::vector<uint32_t>(MaskWords(TinyVocabulary()))};
  for (const int32_t token : tokens) mask.allowed[token / 32] |= 1u << (token % 32);
  return mask;
}
// Masks before their plan, after it, and in parts; beside steps that have none.
TEST_P(EngineContract, MaskedStepsSampleWhatIsAllowed) {
  const uint64_t epoch = engine().epoch();
  const int32_t last = TinyVocabulary() - 1;
  engine().SetMasks(epoch, 0, {MaskOf(0, {7})});
  engine().Submit(PlanOf(epoch, 0)
                      .Start(StartOf(1, 2, {1}))
                      .Start(StartOf(2, 2, {2}))
                      .Start(StartOf(3, 2, {3}))
                      .Step(MaskedOf(StepOf(1, 0, {1, 2})))
                      .Step(SampleOf(StepOf(2, 0, {1, 2})))
                      .Step(MaskedOf(StepOf(3, 0, {1, 2}))));
  EXPECT_TRUE(engine().TakeResults().empty());
  engine().SetMasks(epoch + 1, 0, {MaskOf(2, {9})});  // of another epoch
  engine().SetMasks(epoch, 0, {MaskOf(2, {last})});
  const IterationResult first = runner_->Next();
  EXPECT_EQ(first.steps[0].token(), 7);
  EXPECT_EQ(first.steps[2].token(), last);
  // One that follows a sample which the host has not seen is masked like any other. (Of several
  // stages, only the last has that.)
  const Step next = stages() > 1 ? StepOf(1, 2, {7}) : PreviousSample(1, 2);
  IterationPlan plan =
      PlanOf(epoch, 1).Step(MaskedOf(next)).Step(SampleOf(StepOf(2, 2, {first.steps[1].token()})));
  engine().Submit(plan);
  engine().SetMasks(epoch, 1, {MaskOf(0, {11, 12})});
  const IterationResult second = runner_->Next();
  EXPECT_TRUE(second.steps[0].token() == 11 || second.steps[0].token() == 12);

  // Tokens sampled without a mask are what they would be without company.
  engine().Submit(PlanOf(epoch, 2).Start(StartOf(4, 2, {4})).Step(SampleOf(StepOf(4, 0, {1, 2}))));
  EXPECT_EQ(runner_->Next().steps[0].token(), first.steps[1].token());
}

TEST_P(EngineContract, MasksThatDoNotFitEndTheEpoch) {
  const auto plan = [&] {
    return IterationPlan(
        PlanOf(engine().epoch(), 0).Start(StartOf(1, 2, {1})).Step(MaskedOf(StepOf(1, 0, {1, 2}))));
  };
  const struct {
    OutputMask mask;
    const char* error;
  } rows[] = {{{0, 0, {1, 2, 3}}, "has 3 words, expected"},
              {MaskOf(5, {7}), "a mask of output 0 of step 5"}};
  for (const auto& [mask, error] : rows) {
    engine().Submit(plan());
    engine().SetMasks(engine().epoch(), 0, {mask});
    runner_->WaitForError();
    EXPECT_THAT(Message(engine().status()), HasSubstr(error));
    engine().Restart();
    runner_->WaitForRoom();
  }
  engine().Submit(plan());  // without any: the restart ends the wait
  engine().Restart();
  runner_->WaitForRoom();
  engine().Submit(PlanOf(engine().epoch(), 0));
  runner_->Next();
}

// An adapter that is not loaded, or not any more, ends the epoch; what has begun with it goes on.
TEST_P(EngineContract, AnAdapterIsThereFromItsLoadToItsUnload) {
  if (!HasAdapters()) GTEST_SKIP() << "the model has two layers, for two stages at most";
  const std::shared_ptr<const AdapterFile> adapter = OpenAdapter("llama");
  EngineRunner runner(MakeEngine(GetParam(), kAdapterBase, Options()));
  Engine& engine = runner.engine();
  runner.WaitForRoom();
  const auto with_adapter = [&](uint64_t iteration, SequenceId id) {
    IterationPlan plan = OneRequest(engine.epoch(), iteration, id);
    plan.starts[0].adapter = adapter->id();
    return plan;
  };
  engine.Submit(with_adapter(0, 1));
  runner.WaitForError();
  EXPECT_THAT(Message(engine.status()), HasSubstr(Str("adapter ", adapter->id())));
  EXPECT_THAT(Message(engine.status()), HasSubstr("which is not loaded"));
  EXPECT_EQ(engine.LoadAdapter(adapter), absl::OkStatus());
  engine.Restart();
  runner.WaitForRoom();
  engine.Submit(with_adapter(0, 1));
  const int32_t token = runner.Next().steps[0].token();
  engine.UnloadAdapter(adapter->id());
  // Once workers have done the former:
  EXPECT_EQ(engine.LoadAdapter(OpenAdapter("llama-bf16")), absl::OkStatus());
  engine.Submit(PlanOf(engine.epoch(), 1).Step(SampleOf(StepOf(1, 3, {token}))));
  runner.Next();
  engine.Submit(with_adapter(2, 2));
  runner.WaitForError();
  EXPECT_THAT(Message(engine.status()), HasSubstr("which is not loaded"));
}

TEST_P(EngineContract, TheTimelineHasEveryStageAndRank) {
  const uint64_t epoch = engine().epoch();
  engine().SetTracing(true);
  std::set<std::pair<int, int>> seen;
  // Tracing begins, and events arrive, a little later on other processes.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  for (uint64_t i = 0; static_cast<int>(seen.size()) < stages() * GetParam().ranks; i += 2) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    engine().Submit(OneRequest(epoch, i));
    runner_->Next();
    for (const TraceEvent& event : engine().TakeTrace()) {
      EXPECT_LE(event.begin, event.end);
      EXPECT_LE(event.iteration, i);
      if (event.kind == TraceEvent::Kind::kForward) seen.insert({event.stage, event.rank});
    }
    engine().Submit(PlanOf(epoch, i + 1).Release(1));
    runner_->Next();
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EngineContract, testing::ValuesIn(EngineKinds()),
                         [](const auto& info) { return info.param.Name(); });

}  // namespace
}  // namespace treadle
