// Properties of the loop over thousands of random histories: nothing is lost, nobody is overtaken,
// no slot leaks, and every client gets a prefix of the reference.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <set>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"
#include "kernels/op_cases/random.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::IsEmpty;

HarnessOptions RandomOptions(Random& random, const std::string& policy) {
  HarnessOptions options;
  options.policy = policy;
  options.engine.manual = true;
  options.engine.manual_restart = random.Below(2) == 0;
  options.engine.record = true;
  if (random.Below(2) == 0) options.engine.window = 2 + random.Below(12);
  options.engine.page_size = 1 + random.Below(5);
  options.engine.total_pages = 1 + (80 + random.Below(100)) / options.engine.page_size;
  if (random.Below(3) == 0) {
    options.engine.stages = static_cast<int>(2 + random.Below(3));
    options.engine.depth = options.engine.stages;
  } else {
    options.engine.depth = static_cast<int>(1 + random.Below(2));
  }
  // A stage of states that was not lost may be too far ahead to go on where another one does.
  if (options.engine.window > 0 && options.engine.stages == 1 && random.Below(2) == 0) {
    options.engine.states = true;
    options.engine.window = options.engine.page_size + 1;
  }
  options.limits.max_batch_size = 1 + random.Below(6);
  options.limits.max_batch_tokens = options.limits.max_batch_size + 1 + random.Below(12);
  options.limits.microbatch_size = random.Below(4);
  options.engine.max_batch_tokens = options.limits.max_batch_tokens;
  if (policy.starts_with("faster-transformer") && random.Below(2) == 0) {
    options.compute_padding = true;
    options.engine.total_pages[PageKind::kWhole] +=
        1 + PaddingRows(options.limits) / options.engine.page_size;
  }
  if (options.engine.window > 0) {  // pages of that kind too, or alone
    PageCounts& pages = options.engine.total_pages;
    pages[PageKind::kWindow] =
        pages[PageKind::kWhole] - random.Below(1 + pages[PageKind::kWhole] / 4);
    if (random.Below(2) == 0) pages[PageKind::kWhole] = 0;
  }
  options.engine.tenants = static_cast<uint64_t>(1 + random.Below(3));
  options.prefix_cache = random.Below(4) > 0;
  options.drafter = MakeOracleDrafter;
  FakeEngineOptions& draft = options.draft_engine.emplace();  // perhaps too small for all
  draft.drafts = true;
  draft.depth = static_cast<int>(1 + random.Below(4));
  draft.page_size = 1 + random.Below(5);
  draft.total_pages = 8 + random.Below(60);
  draft.max_batch_tokens = options.limits.max_batch_tokens;
  if (random.Below(2) == 0) {
    draft.window = 2 + random.Below(12);
    draft.total_pages[PageKind::kWindow] = 8 + random.Below(60);
  }
  draft.wrong_every = 4;
  draft.tenants = options.engine.tenants;
  options.draft_context = 8 + random.Below(40);
  const int64_t logged = random.Below(3);  // nothing, about half of the pages, or all
  options.engine.replay_pages = options.engine.total_pages[PageKind::kWhole] * logged / 2;
  return options;
}

// Losses of an engine: some neighbouring stages, nothing, or all.
StageRange RandomLoss(Random& random, const LoopHarness& harness) {
  const auto begin = static_cast<int32_t>(random.Below(harness.options.engine.stages));
  const auto count = static_cast<int32_t>(random.Below(4));
  return count == 3 ? StageRange() : StageRange{begin, begin + count};
}

// At most 33 positions, 4 candidates: fits into the smallest cache of RandomOptions when the
// candidates are few.
RequestSpec RandomSpec(Random& random, const LoopHarness& harness, uint64_t seed) {
  RequestSpec spec = LoopHarness::Spec(static_cast<int32_t>(1 + random.Below(16)),
                                       static_cast<int32_t>(1 + random.Below(12)), seed);
  spec.owner = std::string(1, static_cast<char>('a' + seed % 3));
  spec.priority = static_cast<int32_t>(seed % 3) - 1;
  spec.weight = static_cast<double>(1 + seed % 3);
  if (seed % 5 > 2) spec.adapter = seed % 5;
  spec.cache_salt = Str(seed % harness.options.engine.tenants, " ", spec.adapter);
  if (seed > 0 && random.Below(2) == 0) {  // a conversation goes on, or branches off
    const Client& other = *harness.clients[static_cast<size_t>(random.Below(seed))];
    std::vector<int32_t> said = other.spec.prompt;
    said.insert(said.end(), other.tokens[0].begin(), other.tokens[0].end());
    said.resize(std::min<size_t>(said.size(), static_cast<size_t>(1 + random.Below(20))));
    said.insert(said.end(), spec.prompt.begin(), spec.prompt.begin() + 1);
    spec.prompt = said;
  }
  const int64_t most = std::min<int64_t>(harness.options.limits.max_batch_size, 3);
  spec.candidates = random.Below(3) == 0 ? static_cast<int32_t>(1 + random.Below(most)) : 1;
  if (random.Below(2) == 0) {
    for (int i = 0; i < 4; ++i) spec.end_tokens.push_back(static_cast<int32_t>(random.Below(64)));
    spec.min_new_tokens = static_cast<int32_t>(random.Below(spec.max_new_tokens + 1));
  }
  if (random.Below(4) == 0) spec.prompt_logprobs = 0;
  if (random.Below(4) == 0) spec.sampling.repetition_penalty = 1.5f;
  spec.speculate = kSpeculate[random.Below(std::ssize(kSpeculate))].value;
  if (harness.options.engine.states) spec.speculate = Speculate::kOff;  // pages are too short
  if (random.Below(6) == 0) {
    spec.deadline = harness.clock.Now() + std::chrono::milliseconds(random.Below(60));
  }
  return spec;
}

// First come, first served, plan by plan: what each request was given so far.
class FcfsWatch {
 public:
  // The plans of the turn that just ended.
  void Check(LoopHarness& harness, const std::vector<IterationPlan>& plans,
             std::vector<std::string>& mistakes) {
    for (const IterationPlan& plan : plans) CheckPlan(harness, plan, mistakes);
  }

 private:
  struct Progress {
    int32_t prompt = 0;   // tokens planned
    int32_t samples = 0;  // planned
  };

  void CheckPlan(LoopHarness& harness, const IterationPlan& plan,
                 std::vector<std::string>& mistakes) {
    for (const SequenceStart& start : plan.starts) {
      const auto index = static_cast<size_t>(start.sampling.seed);
      owner_[start.sequence] = index;
      if (start.candidate != 0) continue;
      if (started_ > 0 && index < last_started_) mistakes.push_back("admission out of order");
      last_started_ = index;
      ++started_;
    }
    std::map<size_t, bool> members;  // by submission; whether it ran its prompt
    for (const Step& step : plan.steps) {
      const size_t index = owner_.at(step.sequence);
      members[index] |= step.first_position + 1 < Prompt(harness, index);
    }
    for (const auto& [later, initiation] : members) {
      for (size_t earlier = 0; earlier < later; ++earlier) {
        if (!members.contains(earlier) && CouldRun(harness, earlier, initiation)) {
          mistakes.push_back(Str("submission ", later, " overtakes ", earlier));
        }
      }
    }
    for (const Step& step : plan.steps) {
      Progress& progress = progress_[owner_.at(step.sequence)];
      progress.prompt = std::max(progress.prompt, step.first_position + step.num_tokens);
      progress.samples += std::ranges::count_if(step.outputs, &RowOutput::sample);
    }
  }

  static int32_t Prompt(const LoopHarness& harness, size_t index) {
    return static_cast<int32_t>(harness.clients[index]->spec.prompt.size());
  }

  // The request has one candidate, not ended, with a token to produce, in a phase served no
  // later than the other's.
  bool CouldRun(const LoopHarness& harness, size_t index, bool other_initiation) {
    const Client& client = *harness.clients[index];
    if (client.ended || client.spec.candidates > 1) return false;
    const Progress& progress = progress_[index];
    if (progress.samples >= client.spec.max_new_tokens) return false;
    return progress.prompt >= Prompt(harness, index) || other_initiation;
  }

  std::map<SequenceId, size_t> owner_;
  std::map<size_t, Progress> progress_;
  size_t last_started_ = 0;
  int64_t started_ = 0;
};

// With several stages a request is in at most one plan in flight, and no stage is left without work
// while some request could run.
class PipelineWatch {
 public:
  // After a turn; `plans`: those that it submitted.
  void Check(const LoopHarness& harness, const std::vector<IterationPlan>& plans,
             std::vector<std::string>& mistakes) {
    for (const IterationPlan& plan : plans) {
      for (const SequenceStart& start : plan.starts) owner_[start.sequence] = start.sampling.seed;
      std::set<uint64_t> members;
      for (const Step& step : plan.steps) members.insert(owner_.at(step.sequence));
      in_flight_.push_back(std::move(members));
    }
    while (static_cast<int64_t>(in_flight_.size()) > harness.engine.running_plans()) {
      in_flight_.pop_front();
    }
    std::set<uint64_t> all;
    for (const std::set<uint64_t>& members : in_flight_) {
      for (const uint64_t member : members) {
        if (!all.insert(member).second) mistakes.push_back(Str(member, " is in two plans"));
      }
    }
    if (!harness.engine.HasRoom()) return;
    for (const auto& client : harness.clients) {
      const std::vector<int32_t>& got = client->tokens[0];
      if (!client->ended && !got.empty() && client->spec.candidates == 1 &&
          !all.contains(client->spec.sampling.seed)) {
        mistakes.push_back(Str(client->spec.sampling.seed, " could run on a stage without work"));
      }
    }
  }

 private:
  std::map<SequenceId, uint64_t> owner_;      // seeds
  std::deque<std::set<uint64_t>> in_flight_;  // oldest first
};

struct Weather {
  bool commands = false;  // cancellations and stop strings
  bool failures = false;
};

// One random history; returns what went wrong.
std::vector<std::string> RunHistory(uint64_t seed, const std::string& policy, Weather weather) {
  Random random(seed);
  LoopHarness harness(RandomOptions(random, policy));
  FcfsWatch watch;
  PipelineWatch pipeline;
  std::vector<std::string> mistakes;
  const bool several = harness.options.engine.stages > 1;
  const bool watched = policy == "fcfs" && !several && !weather.failures;
  const auto look = [&] {
    const std::vector<IterationPlan> plans = harness.engine.TakePlans();
    if (watched) watch.Check(harness, plans, mistakes);
    if (several && policy == "fcfs") pipeline.Check(harness, plans, mistakes);
  };
  const int events = 60 + static_cast<int>(random.Below(100));
  for (int i = 0; i < events; ++i) {
    const int64_t what = random.Below(100);
    if (what < 15) {
      const RequestSpec spec = RandomSpec(random, harness, harness.clients.size());
      // As the server does: what can never fit is refused at the door.
      if (PagesNeeded(spec, harness.options.engine.paging())
              .FitsIn(harness.options.engine.total_pages)) {
        harness.Submit(spec);
      }
    } else if (what < 45) {
      harness.engine.Complete();
    } else if (what < 50) {
      harness.clock.Advance(std::chrono::milliseconds(random.Below(30)));
    } else if (what < 55 && weather.commands && !harness.clients.empty()) {
      const auto index =
          static_cast<size_t>(random.Below(static_cast<int64_t>(harness.clients.size())));
      const Client& client = *harness.clients[index];
      if (random.Below(2) == 0) {
        harness.pool.Cancel(client.id, absl::CancelledError("gone"));
      } else {
        harness.pool.FinishCandidate(client.id,
                                     static_cast<uint32_t>(random.Below(client.spec.candidates)));
      }
    } else if (what < 57 && weather.failures) {
      harness.engine.Fail(absl::InternalError("lost a worker"), RandomLoss(random, harness));
    } else if (what < 60) {
      harness.engine.FinishRestart();
    } else {
      harness.Turn();
      look();
    }
  }
  harness.pool.Drain();
  harness.Turn();  // a failure that is not known yet
  harness.engine.FinishRestart();
  harness.RunToIdle();
  if (watched) look();
  for (const auto& client : harness.clients) {
    if (!client->ended) mistakes.push_back(Str("request ", client->id, " never ended"));
    if (client->status.code() == absl::StatusCode::kUnavailable) {
      mistakes.push_back(Str("request ", client->id, " was lost with the engine"));
    }
  }
  if (!harness.loop->drained()) mistakes.push_back("not drained");
  // The last releases ride on a heartbeat.
  harness.clock.Advance(std::chrono::seconds(2));
  harness.RunToIdle();
  if (harness.engine.live_sequences() != 0) mistakes.push_back("sequences were not released");
  for (std::string& mistake : harness.Mistakes()) mistakes.push_back(std::move(mistake));
  return mistakes;
}

struct Case {
  const char* name;
  const char* policy;
  Weather weather;
};

class LoopProperties : public testing::TestWithParam<Case> {};

TEST_P(LoopProperties, HoldOverRandomHistories) {
  // No threads are in it.
  constexpr uint64_t kHistories = kThreadSanitized ? 200 : 4000;
  for (uint64_t seed = 0; seed < kHistories; ++seed) {
    ASSERT_THAT(RunHistory(seed, GetParam().policy, GetParam().weather), IsEmpty())
        << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, LoopProperties,
    testing::Values(Case{"FcfsCalm", "fcfs", {}}, Case{"FcfsCommands", "fcfs", {true, false}},
                    Case{"FcfsFailures", "fcfs", {true, true}},
                    Case{"RequestLevelCalm", "request-level", {}},
                    Case{"RequestLevelCommands", "request-level", {true, false}},
                    Case{"RequestLevelFailures", "request-level", {true, true}},
                    Case{"FasterTransformerCalm", "faster-transformer", {}},
                    Case{"FasterTransformerCommands", "faster-transformer", {true, false}},
                    Case{"FasterTransformerFailures", "faster-transformer", {true, true}},
                    Case{"PaddedCalm", "faster-transformer-padded", {}},
                    Case{"PaddedFailures", "faster-transformer-padded", {true, true}},
                    Case{"PriorityCommands", "priority", {true, false}},
                    Case{"PriorityFailures", "priority", {true, true}},
                    Case{"FairShareCommands", "fair-share", {true, false}},
                    Case{"FairShareFailures", "fair-share", {true, true}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace treadle
