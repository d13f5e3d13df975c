// How many sequences and tokens an iteration should have, by what it costs (iteration_cost.h).
//
// Sequences: as many as still raise the throughput noticeably. More only make everybody's next
// token wait longer. The limit is where twice as many would bring less than kWorthDoubling times
// the tokens/s: what is gained beyond it is as small as the differences between two runs on a
// machine that is shared. Fewer, if that many alone would take longer than the target.
//
// Tokens: as many as an iteration may have that takes no longer than the target, the time between
// two tokens of a stream while others' prompts run. There is room for a prompt beside the
// sequences, whatever the target.
//
// Answers do not depend on either (docs/design.md, N1 and N2). Thread safety: stateless.
#pragma once

#include <string>

#include "scheduler/cost/iteration_cost.h"
#include "scheduler/policy.h"

namespace treadle {

struct AutoBatch {
  bool size = false;        // BatchLimits::max_batch_size is to be chosen
  bool tokens = false;      // BatchLimits::max_batch_tokens is to be chosen
  double target_itl = 0.1;  // seconds
  int64_t context = 512;    // positions that a sequence is taken to have
  int64_t most_size = 256;  // that the K/V cache has room for, with such contexts
  bool any() const { return size || tokens; }
};

inline constexpr double kWorthDoubling = 1.1;

// The limits with what is to be chosen, at most the tokens that `limits` has (the engine's).
// Requires that something was noted.
BatchLimits ChooseBatch(const IterationCost& cost, const BatchLimits& limits,
                        const AutoBatch& choice);
// Seconds of an iteration of these limits while a prompt fills it.
double FullIteration(const IterationCost& cost, const BatchLimits& limits, int64_t context);

}  // namespace treadle
