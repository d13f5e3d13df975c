// Admission under the policies that do not go by arrival alone, over random histories.

#include "scheduler/fair_share.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/op_cases/random.h"
#include "tests/scheduler/loop_harness.h"

namespace treadle {
namespace {

using testing::ElementsAre;

constexpr int32_t kMaxPrompt = 3;

// Whoever is admitted begins at once: there are tokens for all prompts of a plan.
HarnessOptions Options(const std::string& policy, int64_t batch_size, int64_t pages) {
  HarnessOptions options;
  options.policy = policy;
  options.prefix_cache = false;
  options.engine.record = true;
  options.engine.manual = true;
  options.engine.page_size = 4;
  options.engine.total_pages = pages;
  options.engine.max_batch_tokens = batch_size * (1 + kMaxPrompt);
  options.limits = {.max_batch_size = batch_size,
                    .max_batch_tokens = batch_size * (1 + kMaxPrompt)};
  return options;
}

// A loop, and the clients that were admitted, in order, by their numbers.
class Admissions {
 public:
  explicit Admissions(const HarnessOptions& options) : harness(options) {}

  size_t Submit(RequestSpec spec) {
    harness.Submit(std::move(spec));
    waiting.insert(harness.clients.size() - 1);
    return harness.clients.size() - 1;
  }
  const RequestSpec& spec(size_t client) const { return harness.clients[client]->spec; }
  void Cancel(size_t client) {
    harness.pool.Cancel(harness.clients[client]->id, absl::CancelledError("gone"));
    waiting.erase(client);
  }
  // A turn; whom it has admitted.
  std::vector<size_t> Turn() {
    harness.Turn();
    std::vector<size_t> admitted;
    for (const IterationPlan& plan : harness.engine.TakePlans()) {
      for (const SequenceStart& start : plan.starts) admitted.push_back(start.sampling.seed);
    }
    return admitted;
  }
  void End() {
    harness.RunToIdle();
    for (const auto& client : harness.clients) EXPECT_TRUE(client->ended) << client->id;
  }

  LoopHarness harness;
  std::set<size_t> waiting;
};

RequestSpec RandomSpec(Random& random, size_t client, const std::string& owner) {
  RequestSpec spec = LoopHarness::Spec(1 + static_cast<int32_t>(random.Below(kMaxPrompt)),
                                       1 + static_cast<int32_t>(random.Below(12)), client);
  spec.owner = owner;
  return spec;
}

double Cost(const RequestSpec& spec) {
  return static_cast<double>(std::ssize(spec.prompt)) + spec.max_new_tokens;
}
constexpr double kMaxCost = kMaxPrompt + 12;

TEST(Priority, ClassesAreOrderedAndWithinAClassArrivals) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    Admissions all(Options("priority", 1 + random.Below(4), 4 + random.Below(12)));
    for (int step = 0; step < 200; ++step) {
      const int64_t what = random.Below(4);
      if (what == 0) {
        RequestSpec spec = RandomSpec(random, all.harness.clients.size(), "");
        spec.priority = static_cast<int32_t>(random.Below(4)) - 2;
        all.Submit(std::move(spec));
      } else if (what == 1) {
        all.harness.engine.Complete();
      } else if (what == 2 && !all.waiting.empty() && random.Below(5) == 0) {
        all.Cancel(*all.waiting.begin());
      } else {
        for (const size_t admitted : all.Turn()) {
          all.waiting.erase(admitted);
          for (const size_t other : all.waiting) {
            const int32_t mine = all.spec(admitted).priority, theirs = all.spec(other).priority;
            ASSERT_TRUE(mine < theirs || (mine == theirs && admitted < other))
                << "seed " << seed << ": " << admitted << " of class " << mine << " before "
                << other << " of class " << theirs;
          }
        }
      }
    }
    all.End();
  }
}

// A long prompt that runs already waits for a short one of an earlier class; tokens go on.
TEST(Priority, PromptsAreComputedInTheSameOrder) {
  HarnessOptions options = Options("priority", 4, 100);
  options.limits.max_batch_tokens = options.engine.max_batch_tokens = 6;
  Admissions all(options);
  all.Submit(LoopHarness::Spec(2, 30, 0));
  all.Turn();
  all.harness.engine.Complete();
  all.Submit(LoopHarness::Spec(40, 2, 1));
  all.Turn();
  all.harness.engine.Complete();
  RequestSpec urgent = LoopHarness::Spec(5, 2, 2);
  urgent.priority = -1;
  all.Submit(std::move(urgent));
  all.harness.Turn();
  const IterationPlan plan = all.harness.engine.TakePlans().back();
  ASSERT_EQ(plan.steps.size(), 2u);
  std::map<SequenceId, int32_t> tokens;
  for (const Step& step : plan.steps) tokens[step.sequence] = step.num_tokens;
  ASSERT_EQ(plan.starts.size(), 1u) << "the long prompt had the tokens";
  EXPECT_EQ(plan.starts[0].sampling.seed, 2u);
  EXPECT_EQ(tokens[plan.starts[0].sequence], 5);
  all.End();
}

// Owners that always have requests that wait.
TEST(FairShare, SharesDifferByNoMoreThanARequestOfEach) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    Admissions all(Options("fair-share", 1 + random.Below(4), 8 + random.Below(12)));
    std::map<std::string, double> weights, had;
    for (const char* const owner : {"a", "b", "c"}) weights[owner] = 0.5 + random.Below(8);
    std::map<std::string, int> waiting;
    for (int step = 0; step < 300; ++step) {
      for (const auto& [owner, weight] : weights) {
        for (; waiting[owner] < 12; ++waiting[owner]) {
          RequestSpec spec = RandomSpec(random, all.harness.clients.size(), owner);
          spec.weight = weight;
          all.Submit(std::move(spec));
        }
      }
      all.harness.engine.Complete();
      for (const size_t admitted : all.Turn()) {
        const RequestSpec& spec = all.spec(admitted);
        --waiting[spec.owner];
        had[spec.owner] += Cost(spec);
        for (const auto& [one, mine] : weights) {
          for (const auto& [other, theirs] : weights) {
            ASSERT_LE(had[one] / mine - had[other] / theirs,
                      kMaxCost / mine + kMaxCost / theirs + 1e-6)
                << "seed " << seed;
          }
        }
      }
    }
    EXPECT_GT(had["a"] + had["b"] + had["c"], 20 * kMaxCost);
    all.End();
  }
}

// While an owner's first request waits, what others are given is bounded; of one owner, requests
// are admitted in their order. Owners come and go, and some requests are cancelled as they wait.
TEST(FairShare, NobodyStarves) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    Admissions all(Options("fair-share", 1 + random.Below(4), 4 + random.Below(12)));
    const std::map<std::string, double> weights = {
        {"a", 1 + random.Below(6)}, {"b", 0.25}, {"c", 1}, {"d", 1 + random.Below(3)}};
    std::map<std::string, double> had;
    std::map<size_t, std::map<std::string, double>> before;  // by client that became first
    const auto note_first = [&] {
      std::set<std::string> seen;
      for (const size_t client : all.waiting) {
        if (seen.insert(all.spec(client).owner).second) before.try_emplace(client, had);
      }
    };
    for (int step = 0; step < 300; ++step) {
      const int64_t what = random.Below(5);
      if (what < 2) {
        // `a` asks all the time.
        const std::string owner =
            random.Below(3) > 0 ? "a" : std::string(1, static_cast<char>('b' + random.Below(3)));
        RequestSpec spec = RandomSpec(random, all.harness.clients.size(), owner);
        spec.weight = weights.at(owner);
        all.Submit(std::move(spec));
      } else if (what == 2) {
        all.harness.engine.Complete();
      } else if (what == 3 && !all.waiting.empty() && random.Below(5) == 0) {
        all.Cancel(*all.waiting.rbegin());
      } else {
        note_first();
        for (const size_t admitted : all.Turn()) {
          const RequestSpec& spec = all.spec(admitted);
          const double mine = weights.at(spec.owner);
          for (const auto& [other, theirs] : weights) {
            if (other == spec.owner) continue;
            ASSERT_LE(had[other] - before.at(admitted)[other],
                      kMaxCost * theirs / mine + kMaxCost + 1e-6)
                << "seed " << seed;
          }
          for (const size_t client : all.waiting) {
            ASSERT_TRUE(client >= admitted || all.spec(client).owner != spec.owner);
          }
          all.waiting.erase(admitted);
          had[spec.owner] += Cost(spec);
          note_first();
        }
      }
    }
    all.End();
  }
}

// One request at a time, of one token.
TEST(FairShare, WhatWasNotProducedIsGivenBack) {
  Admissions all(Options("fair-share", 1, 100));
  const auto submit = [&](const char* owner, int32_t max_new) {
    RequestSpec spec = LoopHarness::Spec(2, max_new, all.harness.clients.size());
    spec.owner = owner;
    return all.Submit(std::move(spec));
  };
  const size_t greedy = submit("a", 100);
  EXPECT_THAT(all.Turn(), ElementsAre(greedy));
  const size_t b1 = submit("b", 1), b2 = submit("b", 1), b3 = submit("b", 1), a = submit("a", 1);
  all.Cancel(greedy);
  all.harness.RunToIdle();
  std::vector<size_t> order;
  for (const IterationPlan& plan : all.harness.engine.TakePlans()) {
    for (const SequenceStart& start : plan.starts) order.push_back(start.sampling.seed);
  }
  // It had 2 tokens or 3 of the 102 that it was charged with, as many as b with its first request.
  EXPECT_THAT(order, testing::AnyOf(ElementsAre(b1, a, b2, b3), ElementsAre(b1, b2, a, b3)));
}

TEST(FairShare, OwnersWithoutRequestsAreForgotten) {
  Admissions all(Options("fair-share", 2, 100));
  const auto& policy = static_cast<const FairShare&>(*all.harness.policy);
  for (const char* const owner : {"a", "b", "c"}) {
    RequestSpec spec = LoopHarness::Spec(2, 4, all.harness.clients.size());
    spec.owner = owner;
    all.Submit(std::move(spec));
  }
  all.Turn();
  EXPECT_EQ(policy.owners(), 3u);
  all.Cancel(2);
  all.End();
  for (int i = 0; i < 3; ++i) {  // until time has passed what each was given
    RequestSpec spec = LoopHarness::Spec(2, 4, all.harness.clients.size());
    spec.owner = "d";
    all.Submit(std::move(spec));
    all.End();
  }
  EXPECT_LE(policy.owners(), 1u);
}

}  // namespace
}  // namespace treadle
