// Speculation: what is guessed, what is tried, and that tokens are the same with and without.
#include "scheduler/speculation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/op_cases/random.h"
#include "scheduler/speculation/ngram_drafter.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

std::vector<int32_t> TokensOf(const std::vector<Guess>& guesses) {
  std::vector<int32_t> tokens;
  for (const Guess& guess : guesses) tokens.push_back(guess.token);
  return tokens;
}

TEST(NgramDrafter, GoesOnAsAfterTheLongestMatch) {
  //                                      "2 3" twice before, "1 2 3" once
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 9, 2, 3, 7, 7, 1, 2, 3};
  const NgramDrafter drafter(tokens);
  EXPECT_THAT(TokensOf(drafter.Next(4)), ElementsAre(4, 5, 9, 2));
}

TEST(NgramDrafter, TakesTheLatestOfEqualMatches) {
  const std::vector<int32_t> tokens = {1, 2, 3, 8, 1, 2, 4, 9, 1, 2};
  EXPECT_THAT(TokensOf(NgramDrafter(tokens).Next(2)), ElementsAre(4, 9));
}

TEST(NgramDrafter, RunsIntoWhatItGuesses) {
  const std::vector<int32_t> tokens = {5, 1, 2, 3, 1, 2, 3};
  EXPECT_THAT(TokensOf(NgramDrafter(tokens).Next(7)), ElementsAre(1, 2, 3, 1, 2, 3, 1));
}

TEST(NgramDrafter, GuessesNothingWhereNothingRepeats) {
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 1};
  EXPECT_THAT(NgramDrafter(tokens).Next(4), IsEmpty());
  EXPECT_THAT(NgramDrafter({}).Next(4), IsEmpty());
}

TEST(NgramDrafter, LooksAtTheTextAlone) {
  Request request;
  request.spec.prompt = {0, 0, 0, 0, 0, 0};
  EXPECT_THAT(MakeNgramDrafter(request, {})->Next(2), SizeIs(2));
  request.spec.virtual_tokens = 4;
  EXPECT_THAT(MakeNgramDrafter(request, {})->Next(2), IsEmpty());
}

// The longest match of any earlier place, as long as those are few; beyond kLongEnough tokens it
// stays where it is.
TEST(NgramDrafter, FindsWhatASearchOfEverythingFinds) {
  Random random(1);
  NgramDrafter drafter({});
  std::vector<int32_t> tokens;
  int found = 0;
  for (int i = 0; i < 2000; ++i) {
    // Passages of an alphabet so large that few pairs occur more than kMaxOccurrences times.
    const int64_t length = tokens.size() > 50 && random.Below(4) == 0 ? 1 + random.Below(20) : 0;
    const int64_t from = length > 0 ? random.Below(std::ssize(tokens) - length) : 0;
    for (int64_t k = from; k < from + length; ++k) {
      tokens.push_back(int32_t{tokens[static_cast<size_t>(k)]});
      drafter.Append(tokens.back());
    }
    if (length == 0) {
      tokens.push_back(static_cast<int32_t>(random.Below(1000)));
      drafter.Append(tokens.back());
    }
    size_t longest = 0;
    int occurrences = 0;
    for (size_t next = 1; next < tokens.size(); ++next) {
      size_t match = 0;
      while (match < next && match < NgramDrafter::kLongEnough &&
             tokens[next - 1 - match] == tokens[tokens.size() - 1 - match]) {
        ++match;
      }
      longest = std::max(longest, match);
      occurrences += match >= NgramDrafter::kMinMatch ? 1 : 0;
    }
    if (occurrences > NgramDrafter::kMaxOccurrences) continue;
    const std::vector<Guess> guesses = drafter.Next(1);
    if (longest < NgramDrafter::kMinMatch) {
      ASSERT_THAT(guesses, IsEmpty()) << i;
      continue;
    }
    ++found;
    ASSERT_THAT(guesses, SizeIs(1)) << i;
    bool follows = false;  // it stands behind such a match
    for (size_t next = longest; next < tokens.size() && !follows; ++next) {
      follows = std::equal(tokens.end() - static_cast<int64_t>(longest), tokens.end(),
                           tokens.begin() + static_cast<int64_t>(next - longest)) &&
                tokens[next] == guesses[0].token;
    }
    ASSERT_TRUE(follows) << i;
  }
  EXPECT_GT(found, 200);
}

TEST(NgramDrafter, LearnsWhetherItIsRight) {
  NgramDrafter wrong({}), right({});
  for (int32_t i = 0; i < 200; ++i) {
    for (const int32_t token : {1, 2, 100 + i}) wrong.Append(token);
    for (const int32_t token : {1, 2, 3}) right.Append(token);
  }
  for (NgramDrafter* drafter : {&wrong, &right}) {
    drafter->Append(1);
    drafter->Append(2);
  }
  EXPECT_LT(wrong.Next(1)[0].probability, 0.01);
  EXPECT_GT(right.Next(1)[0].probability, 0.99);
}

TEST(IterationCost, IsTheLineThroughWhatRan) {
  IterationCost cost;
  for (int i = 0; i < 50; ++i) {
    for (const int rows : {1, 2, 8, 32}) cost.Note(rows, 0.004 + 0.001 * rows);
  }
  EXPECT_NEAR(cost.per_row(), 0.001, 1e-6);
  EXPECT_NEAR(cost.Of(16), 0.020, 1e-5);
}

TEST(IterationCost, ReliesOnTheFirstShareWhereAllAreAlike) {
  IterationCost cost;
  for (int i = 0; i < 50; ++i) cost.Note(1, 0.010);
  EXPECT_NEAR(cost.per_row(), 0.010 * IterationCost::kFirstShare, 1e-9);
  EXPECT_NEAR(cost.Of(1), 0.010, 1e-9);
}

// Guesses always as probable as told.
class Sure final : public Drafter {
 public:
  explicit Sure(double probability) : probability_(probability) {}
  void Append(int32_t) override {}
  std::vector<Guess> Next(int32_t count) const override {
    std::vector<Guess> guesses;
    double probability = 1;
    for (int32_t i = 0; i < count; ++i) guesses.push_back({7, probability *= probability_});
    return guesses;
  }

 private:
  const double probability_;
};

// The length of the draft of one of `batch` sequences that decode, in a plan of `most` rows.
size_t DraftOf(double probability, int batch, int64_t most, int32_t max_new = 100) {
  const BatchLimits limits{.max_batch_tokens = most};
  const IterationCost cost;
  const Speculation speculation(MakeNgramDrafter, limits, cost);
  std::vector<std::unique_ptr<Request>> requests;
  Selection selection;
  for (int i = 0; i < batch; ++i) {
    auto& request = *requests.emplace_back(std::make_unique<Request>());
    request.spec.prompt = {1};
    request.spec.max_new_tokens = max_new;
    request.spec.end_tokens = {9};
    request.state = RequestState::kRunning;
    Sequence& sequence = request.sequences.emplace_back();
    sequence.output = {2};
    sequence.next_position = sequence.known = sequence.produced = 1;
    if (i == 0) sequence.drafter = std::make_shared<Sure>(probability);
    selection.push_back({&request, 1});
  }
  speculation.Choose(selection, /*model_may_run=*/true);
  return requests[0]->sequences[0].draft.size();
}

TEST(Speculation, TriesWhatIsWorthARow) {
  EXPECT_EQ(DraftOf(0.1, 1, 64), 0);
  EXPECT_GE(DraftOf(0.5, 1, 64), 1);
  EXPECT_EQ(DraftOf(0.99, 1, 64), static_cast<size_t>(Speculation::kMaxDraft));
  // The fuller the iteration, the surer it must be.
  EXPECT_EQ(DraftOf(0.5, 32, 64), 0);
  EXPECT_GE(DraftOf(0.99, 32, 64), 1);
  // Neither beyond the plan's tokens nor beyond the request's.
  EXPECT_EQ(DraftOf(0.99, 1, 5), 4);
  EXPECT_EQ(DraftOf(0.99, 1, 64, 4), 2);
}

class Loop : public testing::TestWithParam<int> {
 protected:
  static HarnessOptions Options() {
    HarnessOptions options;
    options.engine.stages = options.engine.depth = GetParam();
    if (GetParam() == 1) options.engine.depth = 2;
    options.engine.manual = options.engine.record = true;
    options.limits.max_batch_tokens = 64;
    return options;
  }
};

TEST_P(Loop, TakesFewerIterationsForTheSameTokens) {
  int plans[2] = {};
  for (const Speculate speculate : {Speculate::kOff, Speculate::kNgram}) {
    HarnessOptions options = Options();
    options.drafter = MakeOracleDrafter;
    LoopHarness harness(options);
    RequestSpec spec = LoopHarness::Spec(9, 60, 5);
    spec.speculate = speculate;
    const Client& client = harness.Submit(spec);
    harness.RunToIdle();
    EXPECT_EQ(client.status, absl::OkStatus());
    EXPECT_THAT(client.tokens[0], SizeIs(60));
    plans[speculate == Speculate::kNgram] = static_cast<int>(harness.engine.TakePlans().size());
    const RequestTimings& counts = harness.EndOf(client.id).timings;
    EXPECT_EQ(counts.draft_tokens > 0, speculate == Speculate::kNgram);
    EXPECT_LE(counts.accepted_draft_tokens, counts.draft_tokens);
    // The ledger has what came of them: the prompt, and each token but the last as an input.
    int32_t tokens = 0;
    uint64_t next = 0, lost = 0;
    for (const auto& record : harness.ledger.Read(next, 1 << 16, lost)) {
      for (const LedgerMember& member : record->members) tokens += member.tokens;
    }
    EXPECT_EQ(tokens, 9 + 59);
    // A token comes of each plan, and of each right guess.
    EXPECT_EQ(plans[speculate == Speculate::kNgram] + counts.accepted_draft_tokens, 60);
  }
  EXPECT_LT(2 * plans[1], plans[0]);
}

// Sequences that try guesses and sequences that do not are in one plan, however many plans there
// may be.
TEST_P(Loop, KeepsTheBatchTogether) {
  if (GetParam() > 1) return;  // with stages, plans share the requests out
  HarnessOptions options = Options();
  options.drafter = MakeOracleDrafter;
  LoopHarness harness(options);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    RequestSpec spec = LoopHarness::Spec(4, 40, seed);
    if (seed < 2) spec.speculate = Speculate::kNgram;
    harness.Submit(spec);
  }
  int drafted = 0;
  for (bool busy = true; busy; busy = harness.engine.Complete() || busy) {
    busy = harness.Turn();
    const auto live = std::ranges::count(harness.clients, false,
                                         [](const auto& client) { return client->ended; });
    for (const IterationPlan& plan : harness.engine.TakePlans()) {
      const bool drafts =
          std::ranges::any_of(plan.steps, [](const Step& step) { return step.outputs.size() > 1; });
      if (!drafts) continue;
      ++drafted;
      EXPECT_EQ(std::ssize(plan.steps), live);
      EXPECT_EQ(harness.engine.running_plans(), 1);
    }
  }
  EXPECT_GT(drafted, 4);
}

INSTANTIATE_TEST_SUITE_P(Stages, Loop, testing::Values(1, 3));

}  // namespace
}  // namespace treadle
