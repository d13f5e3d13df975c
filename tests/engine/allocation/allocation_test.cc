// The per-iteration bookkeeping of a stage does not allocate once its sequences are there. In a
// binary of its own, because it counts every allocation of the process.
#include <gtest/gtest.h>

#include "engine/plan/sequence_table.h"
#include "tests/engine/allocation/allocation_counter.h"
#include "tests/engine/plan_builder.h"

namespace treadle {
namespace {

TEST(SequenceTableAllocation, TheSteadyStateHasNone) {
  constexpr int kSequences = 64;
  SequenceTable table({.page_size = 16,
                       .num_pages = 8 * kSequences,
                       .vocab = 1000,
                       .context = 128,
                       .max_batch_tokens = 256});
  for (int32_t id = 1; id <= kSequences; ++id) {
    SequenceStart start = StartOf(id, 4, {});
    for (int32_t page = 0; page < 8; ++page)
      start.pages[PageKind::kWhole].push_back(8 * (id - 1) + page);
    if (id % 2 == 0) start.sampling.repetition_penalty = 1.1f;
    ASSERT_EQ(table.Start({&start, 1}), absl::OkStatus());
    table.At(id).Enter(0, std::vector<int32_t>{1, 2, 3, 4});
  }
  IterationPlan plan;
  for (int32_t id = 1; id <= kSequences; ++id) plan.steps.push_back(PreviousSample(id, 4));

  const int64_t before = Allocations();
  ASSERT_GT(before, 0);  // the counter counts
  bool ok = true;
  for (int32_t i = 0; i < 100; ++i) {
    for (int32_t id = 1; id <= kSequences; ++id) table.At(id).SetSample((id * 31 + i * 7) % 1000);
    ok = ok && table.Check(plan).ok();
    for (Step& step : plan.steps) {
      LiveSequence& sequence = table.At(step.sequence);
      const int32_t sample = sequence.previous_sample();
      sequence.Enter(step.first_position, {&sample, 1});
      ++step.first_position;
    }
  }
  EXPECT_EQ(Allocations() - before, 0);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace treadle
