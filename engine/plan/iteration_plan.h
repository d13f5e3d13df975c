// One iteration as a value: what the scheduler's planner says to the engine, and what comes back.
//
// A plan has no pointers, is incremental, and is applied in the order releases, page stores, page
// copies, starts, page loads, steps. The plans of an epoch are the engine's complete input
// (docs/design.md, The plan), which makes replay exact. Positions, prompt lengths and rows are in
// tokens; times in seconds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/choice.h"
#include "engine/plan/kv_paging.h"
#include "kernels/kv_view.h"
#include "kernels/sampling.h"
#include "models/expert_use.h"

namespace treadle {

using SequenceId = uint64_t;

// The result made of a prompt's final hidden states (after the last norm), if not tokens: their
// mean, or the last one.
enum class Pooling : uint8_t { kNone, kMean, kLast };
inline constexpr Choice<Pooling> kPoolings[] = {
    {"none", Pooling::kNone}, {"mean", Pooling::kMean}, {"last", Pooling::kLast}};

// Announces a sequence: its pages (all that it may ever need) and how it samples.
struct SequenceStart {
  SequenceId sequence = 0;
  int32_t prompt_length = 0;
  int32_t first_position = 0;  // of its first step; the pages hold the rows before it already
  SequencePages pages;
  SamplingParameters sampling;
  int32_t min_new_tokens = 0;
  std::vector<int32_t> end_tokens;  // suppressed until min_new_tokens were produced
  uint32_t candidate = 0;
  std::vector<int32_t> earlier_tokens;  // [first_position] ids before the first position
  uint64_t adapter = 0;                 // AdapterFile::id of one that was loaded; 0: none
  // A row's hidden output is the mean over the sequence's rows up to it, summed as they run. Then
  // each step follows the one before, and only last rows have outputs.
  bool mean_pooling = false;
};

// A request for output at one row of a step, made from the row's final hidden state.
struct RowOutput {
  int32_t row = 0;              // of the step
  bool sample = false;          // a token for the position after the row
  bool masked = false;          // with sample: one that Engine::SetMasks allows, at any length
  bool hidden = false;          // the state itself, after the model's last norm
  int32_t top_logprobs = -1;    // of the sample: -1 none, 0 the token's own, k: also the k best
  int32_t target = -1;          // the log probability of this token after the row; -1: none
  int32_t target_logprobs = 0;  // with target: also the k best
};

// Runs num_tokens tokens of one sequence from first_position on. Writing there discards what lay at
// that position or later.
struct Step {
  SequenceId sequence = 0;
  int32_t first_position = 0;
  int32_t num_tokens = 0;
  // [num_tokens]; empty: one token, the sample of the last row of the sequence's last step
  std::vector<int32_t> tokens = {};
  std::vector<RowOutput> outputs = {};  // ascending by row
};

// The tokens that a masked output may sample.
struct OutputMask {
  int32_t step = 0;               // its index in the plan
  int32_t output = 0;             // its index in the step
  std::vector<uint32_t> allowed;  // [MaskWords(vocab)] bits, as SampleRow::mask
};

inline size_t MaskWords(int64_t vocab) { return static_cast<size_t>((vocab + 31) / 32); }

// The half-open range [begin, end) of pipeline stages; by default all.
struct StageRange {
  int32_t begin = 0;
  int32_t end = INT32_MAX;

  bool empty() const { return begin >= end; }
  bool Contains(int32_t stage) const { return stage >= begin && stage < end; }
  // The smallest that has all of both.
  StageRange Around(const StageRange& other) const {
    if (empty() || other.empty()) return empty() ? other : *this;
    return {std::min(begin, other.begin), std::max(end, other.end)};
  }
  friend bool operator==(const StageRange&, const StageRange&) = default;
};
inline constexpr StageRange kNoStages = {0, 0};

// Asks for the bytes of a whole page, if the row of its last slot has this tag (slot_tags.h).
struct PageStore {
  int32_t page = 0;
  uint64_t tag = 0;
};

// The bytes, from such a result, of the page at an index of a sequence that the same plan starts
// behind it.
struct PageLoad {
  SequenceId sequence = 0;
  int32_t index = 0;
  std::vector<std::byte> bytes = {};
};

struct IterationPlan {
  uint64_t epoch = 0;
  uint64_t iteration = 0;  // consecutive within an epoch, from 0
  std::vector<SequenceId> releases = {};
  // Stores and loads are for engines of one rank in this process: they have no form on the wire.
  std::vector<PageStore> page_stores = {};
  ByKind<std::vector<PageCopy>> page_copies = {};
  std::vector<SequenceStart> starts = {};
  std::vector<PageLoad> page_loads = {};
  std::vector<Step> steps = {};
  // The stages that execute this plan; may be empty. The caches of the others have its rows, from
  // an epoch before: they only note them, without copying pages; the stage before the first that
  // executes sends from its replay log. Without the last stage no step may have outputs.
  StageRange stages = {};
  // The replica of each stage that runs the plan. Empty: replica 0 of each, the only one so far.
  std::vector<int32_t> replicas = {};

  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const Step& step : steps) sum += step.num_tokens;
    return sum;
  }
};

// The log probabilities that were asked about one token.
struct TokenDetail {
  float logprob = 0;
  std::vector<TokenLogprob> top;
};

struct RowResult {
  int32_t token = -1;              // the sample; -1: none was asked
  TokenDetail detail = {};         // of `token`, if top_logprobs >= 0
  TokenDetail target = {};         // of the output's target
  std::vector<float> hidden = {};  // [hidden], if asked
};

struct StepResult {
  SequenceId sequence = 0;
  std::vector<RowResult> outputs = {};  // as the step's

  // The sample of the last output; -1: there is none.
  int32_t token() const { return outputs.empty() ? -1 : outputs.back().token; }
};

// Where the last stage's time went, as rank 0 saw it; its own clock.
struct IterationTimings {
  double queue = 0;    // from the plan's arrival to the rank's start
  double receive = 0;  // waiting for the previous stage's activations
  double compute = 0;  // forward pass, waits between ranks included
  double sample = 0;   // head and sampling
  // From the end of the rank's previous iteration to the start of this one's forward pass: a bubble
  // if there was work in flight all the while. 0 for the first of an epoch.
  double gap = 0;
};

struct IterationResult {
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  std::vector<StepResult> steps;  // in the plan's order
  // The bytes for the plan's page stores, in their order; empty: the page does not hold the row.
  std::vector<std::vector<std::byte>> stored_pages = {};
  IterationTimings timings;
  ExpertUse experts;  // of the last stage's layers, as rank 0 saw it
};

}  // namespace treadle
