// Constraints in the loop: every token is one that its constraint allowed, whatever else runs, and
// who has none is served as ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/status.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int32_t kEnd = 63;

// Allows tokens of which, with all before them, the sum is a multiple of three; the end after
// `least` of them, nothing else after `most`, and nothing at all after `stuck`.
struct Rule {
  int least = 0;
  int most = 1000;
  int stuck = 1000;
  int slow = 1000;  // that mask takes longer than it may
  int late = 1000;  // that mask is not there as long as the gate is shut
  std::atomic<bool>* gate_open = nullptr;

  bool Allows(const std::vector<int32_t>& before, int32_t token) const {
    const int produced = static_cast<int>(before.size());
    if (token == kEnd) return produced >= least;
    int sum = token;
    for (const int32_t each : before) sum += each;
    return produced < most && sum % 3 == 0;
  }
};

class RuleGrammar final : public ConstraintGrammar {
 public:
  explicit RuleGrammar(const Rule& rule) : rule_(rule) {}
  std::unique_ptr<TokenConstraint> Begin() const override {
    class State final : public TokenConstraint {
     public:
      explicit State(const Rule& rule) : rule_(rule) {}
      absl::Status Accept(int32_t token) override {
        if (!rule_.Allows(before_, token)) return InvalidArgument("not allowed");
        before_.push_back(token);
        return absl::OkStatus();
      }
      void Rollback(int32_t count) override {
        before_.resize(before_.size() - static_cast<size_t>(count));
      }
      absl::Status FillMask(std::span<uint32_t> allowed) override {
        while (std::ssize(before_) == rule_.slow && TooFast()) {
        }
        while (std::ssize(before_) == rule_.late && !*rule_.gate_open) std::this_thread::yield();
        if (std::ssize(before_) == rule_.stuck) return InvalidArgument("nothing is allowed");
        std::ranges::fill(allowed, 0);
        for (int32_t token = 0; token < FakeEngine::kVocab; ++token) {
          if (rule_.Allows(before_, token)) allowed[token / 32] |= 1u << (token % 32);
        }
        return absl::OkStatus();
      }

     private:
      static bool TooFast() {
        timespec time{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec) <
               2 * MaskedCandidate::kMaxTime + 5 * MaskedCandidate::kTimePerToken;
      }
      const Rule rule_;
      std::vector<int32_t> before_;
    };
    return std::make_unique<State>(rule_);
  }
  int32_t vocab() const override { return FakeEngine::kVocab; }

 private:
  const Rule rule_;
};

RequestSpec Constrained(RequestSpec spec, const Rule& rule) {
  spec.constraint = std::make_shared<RuleGrammar>(rule);
  spec.end_tokens = {kEnd};
  spec.speculate = Speculate::kNgram;
  return spec;
}

void Step(LoopHarness& harness) {
  if (harness.options.engine.manual) harness.engine.Complete();
  harness.Turn();
}

// Turns until all have ended; masks come from another thread.
void RunToEnd(LoopHarness& harness) {
  const auto deadline = Clock::now() + std::chrono::minutes(1);
  const auto live = [&] {
    return std::ranges::any_of(harness.clients, [](const auto& client) { return !client->ended; });
  };
  while (live() && Clock::now() < deadline) {
    harness.RunToIdle();
    std::this_thread::yield();
  }
  while (harness.engine.running_plans() > 0 && Clock::now() < deadline) harness.RunToIdle();
  harness.RunToIdle();
}

void ExpectObeyed(const Client& client, const Rule& rule) {
  EXPECT_EQ(client.status, absl::OkStatus());
  for (size_t i = 0; i < client.tokens.size(); ++i) {
    std::vector<int32_t> before;
    for (const int32_t token : client.tokens[i]) {
      EXPECT_TRUE(rule.Allows(before, token)) << token << " as number " << before.size();
      before.push_back(token);
    }
    EXPECT_EQ(client.finish[i] == FinishReason::kEndToken, before.back() == kEnd);
  }
}

struct Shape {
  int stages;
  int depth;
  bool manual;
};

class Masks : public testing::TestWithParam<Shape> {
 protected:
  Masks() {
    options_.engine.stages = GetParam().stages;
    options_.engine.depth = GetParam().depth;
    options_.engine.manual = GetParam().manual;
    options_.engine.total_pages = 400;
    options_.limits = {.max_batch_size = 16, .max_batch_tokens = 64};
    options_.as_reference = false;
    // Guesses that some masks allow, and that are mostly wrong.
    options_.drafter = [](const Request& request, const Sequence& sequence) {
      std::vector<int32_t> guesses;
      for (int32_t i = 0; i < request.spec.max_new_tokens; ++i) guesses.push_back(i * 3 % 63);
      return std::make_unique<OracleDrafter>(guesses, sequence.output.size(), request.id);
    };
  }
  HarnessOptions options_;
};

TEST_P(Masks, AreObeyedByTheirRowsAndNoOthers) {
  std::vector<std::vector<std::vector<int32_t>>> answers;
  for (const bool company : {false, true}) {
    LoopHarness harness(options_);
    std::vector<std::pair<Client*, Rule>> constrained;
    for (int i = 0; i < 4; ++i) {
      const Rule rule{.least = i, .most = 6 + i};
      RequestSpec spec = LoopHarness::Spec(3 + i, 12, static_cast<uint64_t>(i));
      spec.candidates = 1 + i % 3;
      constrained.emplace_back(&harness.Submit(Constrained(spec, rule)), rule);
      if (company) harness.Submit(LoopHarness::Spec(5, 20, static_cast<uint64_t>(10 + i)));
    }
    RunToEnd(harness);
    for (const auto& [client, rule] : constrained) {
      ExpectObeyed(*client, rule);
      if (company) {
        EXPECT_EQ(client->tokens, answers.front()) << "N1";
        answers.erase(answers.begin());
      } else {
        answers.push_back(client->tokens);
      }
    }
    for (const auto& client : harness.clients) {
      if (!client->spec.constraint) {
        EXPECT_EQ(client->Mistake(), "");
      }
    }
    EXPECT_THAT(harness.engine.violations(), IsEmpty());
  }
}

TEST_P(Masks, AreThoseOfTheTokensThatGuessesTurnOutToBe) {
  std::vector<std::vector<std::vector<int32_t>>> plain;
  options_.drafter = [&](const Request& request, const Sequence& sequence) {
    const size_t index = request.spec.sampling.seed;
    return std::make_unique<OracleDrafter>(plain[index][sequence.candidate], sequence.output.size(),
                                           index);
  };
  for (const bool speculates : {false, true}) {
    LoopHarness harness(options_);
    for (int i = 0; i < 4; ++i) {
      RequestSpec spec = Constrained(LoopHarness::Spec(3 + i, 30, static_cast<uint64_t>(i)),
                                     {.least = 3 + i, .most = 25});
      spec.candidates = 1 + i % 3;
      spec.min_new_tokens = 5;
      if (!speculates) spec.speculate = Speculate::kOff;
      harness.Submit(spec);
    }
    RunToEnd(harness);
    for (const auto& client : harness.clients) {
      EXPECT_EQ(client->status, absl::OkStatus());
      if (!speculates) plain.push_back(client->tokens);
      EXPECT_EQ(client->tokens, plain[client->spec.sampling.seed]);
      const RequestTimings& counts = harness.EndOf(client->id).timings;
      EXPECT_EQ(counts.accepted_draft_tokens > 3, speculates);
    }
    EXPECT_THAT(harness.engine.violations(), IsEmpty());
  }
}

TEST_P(Masks, TheLeastNumberOfTokensYieldsToTheConstraintsEnd) {
  LoopHarness harness(options_);
  std::vector<Client*> open;
  RequestSpec spec;
  for (uint64_t seed = 0; seed < 200; ++seed) {  // of some of which the end comes next
    spec = Constrained(LoopHarness::Spec(3, 20, seed), {});
    spec.min_new_tokens = 3;
    open.push_back(&harness.Submit(spec));
  }
  spec.min_new_tokens = 10;
  spec.constraint = std::make_shared<RuleGrammar>(Rule{.most = 4});
  Client& closed = harness.Submit(spec);
  RunToEnd(harness);
  for (const Client* each : open) EXPECT_GT(each->tokens[0].size(), 3u);
  EXPECT_EQ(closed.tokens[0].size(), 5u);
  EXPECT_EQ(closed.tokens[0].back(), kEnd);
}

TEST_P(Masks, AConstraintThatAllowsNothingEndsItsRequestAlone) {
  LoopHarness harness(options_);
  Client& stuck =
      harness.Submit(Constrained(LoopHarness::Spec(3, 20, 1), {.least = 9, .stuck = 4}));
  Client& other = harness.Submit(LoopHarness::Spec(4, 30, 2));
  RunToEnd(harness);
  EXPECT_EQ(stuck.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(stuck.status.message(), "nothing is allowed");
  EXPECT_EQ(stuck.tokens[0].size(), 4u);
  EXPECT_EQ(other.Mistake(), "");
  EXPECT_THAT(harness.engine.violations(), IsEmpty());

  RequestSpec spec = Constrained(LoopHarness::Spec(3, 20, 1), {.least = 9, .slow = 2});
  spec.speculate = Speculate::kOff;  // so that it is slow with that token
  Client& slow = harness.Submit(spec);
  RunToEnd(harness);
  EXPECT_THAT(std::string(slow.status.message()),
              testing::StartsWith("the constraint is too expensive"));
  EXPECT_EQ(slow.tokens[0].size(), 2u);
}

// A mask that does not come holds up its own sequence, which loses and gains nothing by it.
TEST_P(Masks, AreNotWaitedForWhenTheyAreLate) {
  for (const int late : {0, 1, 4}) {
    std::vector<std::vector<std::vector<int32_t>>> answers;
    for (const bool shut : {false, true}) {
      std::atomic<bool> gate_open = !shut;
      LoopHarness harness(options_);
      std::vector<Client*> constrained;
      for (int i = 0; i < 3; ++i) {
        Rule rule{.least = 8, .most = 12};
        if (i == 0) rule.late = late;
        rule.gate_open = &gate_open;
        RequestSpec spec = LoopHarness::Spec(3 + i, 20, static_cast<uint64_t>(i));
        spec.candidates = 1 + i % 2;
        spec.prompt_logprobs = 0;
        constrained.push_back(&harness.Submit(Constrained(spec, rule)));
      }
      Client& other = harness.Submit(LoopHarness::Spec(4, 60, 9));
      // Everybody else comes to the end, those under other constraints too.
      const auto going = [&] {
        return !other.ended || !constrained[1]->ended || !constrained[2]->ended;
      };
      const auto deadline = Clock::now() + std::chrono::minutes(1);
      while (going() && Clock::now() < deadline) {
        harness.RunToIdle();
        // Not sooner than other threads have had as much time.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        harness.clock.Advance(std::chrono::milliseconds(1));
      }
      EXPECT_FALSE(going());
      EXPECT_EQ(constrained[0]->ended, !shut) << late;
      EXPECT_EQ(other.Mistake(), "");
      gate_open = true;
      RunToEnd(harness);
      std::vector<std::vector<int32_t>> tokens;
      for (const Client* client : constrained) {
        EXPECT_EQ(client->status, absl::OkStatus());
        EXPECT_EQ(client->prompt.size(), client->spec.prompt.size() - 1) << "told once";
        tokens.insert(tokens.end(), client->tokens.begin(), client->tokens.end());
      }
      answers.push_back(tokens);
      EXPECT_EQ(harness.held_pages(), 0);
      EXPECT_THAT(harness.engine.violations(), IsEmpty());
    }
    EXPECT_EQ(answers[0], answers[1]) << late;
  }
}

TEST_P(Masks, ThatNeverComeEndTheirRequestAlone) {
  std::atomic<bool> gate_open = false;
  LoopHarness harness(options_);
  std::vector<Client*> late;
  for (size_t i = 0; i < MaskThread::kMaxThreads + 2; ++i) {
    Rule rule{.least = 8, .late = 2};
    rule.gate_open = &gate_open;
    late.push_back(&harness.Submit(Constrained(LoopHarness::Spec(3, 20, i), rule)));
  }
  Client& other = harness.Submit(LoopHarness::Spec(4, 60, 9));
  const auto going = [&] {
    return !other.ended || !std::ranges::all_of(late, [](const Client* c) { return c->ended; });
  };
  const auto deadline = Clock::now() + std::chrono::minutes(1);
  while (going() && Clock::now() < deadline) {
    harness.RunToIdle();
    harness.clock.Advance(MaskOrders::kMinPatience);
    std::this_thread::yield();
  }
  EXPECT_EQ(other.Mistake(), "");
  EXPECT_EQ(other.status, absl::OkStatus());
  for (const Client* client : late) {
    EXPECT_THAT(std::string(client->status.message()), testing::HasSubstr("is not there after"));
    EXPECT_LE(client->tokens[0].size(), 2u);
  }
  gate_open = true;
  RunToEnd(harness);
  EXPECT_EQ(harness.held_pages(), 0);
  EXPECT_THAT(harness.engine.violations(), IsEmpty());
}

TEST_P(Masks, ThoseOfRequestsThatEndEarlyHoldNobodyUp) {
  LoopHarness harness(options_);
  const Rule endless{.least = 1000};
  Client& cancelled = harness.Submit(Constrained(LoopHarness::Spec(3, 50, 1), endless));
  Client& stopped = harness.Submit(Constrained(LoopHarness::Spec(3, 50, 2), endless));
  Client& other = harness.Submit(LoopHarness::Spec(4, 60, 3));
  while (cancelled.tokens[0].size() < 3) Step(harness);
  harness.pool.Cancel(cancelled.id, absl::CancelledError("enough"));
  harness.pool.FinishCandidate(stopped.id, 0);
  RunToEnd(harness);
  EXPECT_TRUE(absl::IsCancelled(cancelled.status));
  EXPECT_THAT(stopped.finish, ElementsAre(FinishReason::kStopString));
  EXPECT_EQ(other.Mistake(), "");
  EXPECT_EQ(harness.held_pages(), 0);
  EXPECT_THAT(harness.engine.violations(), IsEmpty());
}

TEST_P(Masks, OfAnEpochThatEndedAreDropped) {
  options_.recover = false;
  LoopHarness harness(options_);
  const Rule rule{.least = 3, .most = 8};
  Client& first = harness.Submit(Constrained(LoopHarness::Spec(3, 50, 1), {.least = 1000}));
  while (first.tokens[0].empty()) Step(harness);
  harness.engine.Fail(absl::UnavailableError("a worker was lost"));
  Client& second = harness.Submit(Constrained(LoopHarness::Spec(3, 50, 1), rule));
  RunToEnd(harness);
  EXPECT_TRUE(absl::IsUnavailable(first.status));
  ExpectObeyed(second, rule);
  EXPECT_THAT(harness.engine.violations(), IsEmpty());
}

TEST_P(Masks, GoOnWhereTheyWereOnceTheEngineIsBack) {
  const Rule rule{.least = 9, .most = 20};
  std::vector<std::vector<int32_t>> undisturbed;
  for (const bool disturbed : {false, true}) {
    LoopHarness harness(options_);
    RequestSpec spec = Constrained(LoopHarness::Spec(3, 30, 1), rule);
    spec.candidates = 2;
    Client& client = harness.Submit(spec);
    for (const size_t tokens : {0, 1, 5, 6}) {
      while (disturbed && client.tokens[1].size() < tokens) Step(harness);
      if (disturbed) harness.engine.Fail(absl::UnavailableError("a worker was lost"));
    }
    RunToEnd(harness);
    ExpectObeyed(client, rule);
    if (!disturbed) undisturbed = client.tokens;
    EXPECT_EQ(client.tokens, undisturbed);
    EXPECT_EQ(harness.engine.epoch(), disturbed ? 5u : 1u);
    EXPECT_THAT(harness.engine.violations(), IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Masks,
                         testing::Values(Shape{1, 1, true}, Shape{1, 2, true}, Shape{1, 2, false},
                                         Shape{3, 3, true}));

}  // namespace
}  // namespace treadle
