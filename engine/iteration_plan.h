// One iteration as a value: what the scheduler's planner says to the engine, and what comes back.
//
// A plan has no pointers, is incremental, and is applied in the order releases, page copies,
// starts, steps. The plans of an epoch are the engine's complete input (docs/design.md, The plan),
// which makes replay exact. Positions, prompt lengths and rows are in tokens; times in seconds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/choice.h"
#include "engine/kv_paging.h"
#include "kernels/kv_view.h"
#include "kernels/sampling.h"
#include "models/expert_use.h"

namespace treadle {

using SequenceId = uint64_t;

// What comes of a prompt's final hidden states (after the model's last norm), if not tokens: their
// mean, or the last one.
enum class Pooling : uint8_t { kNone, kMean, kLast };
inline constexpr Choice<Pooling> kPoolings[] = {
    {"none", Pooling::kNone}, {"mean", Pooling::kMean}, {"last", Pooling::kLast}};

// Announces a sequence: its pages (all that it may ever need) and how it samples.
struct SequenceStart {
  SequenceId sequence = 0;
  int32_t prompt_length = 0;
  int32_t first_position = 0;  // 0, or prompt_length - 1 for further candidates
  SequencePages pages;
  SamplingParameters sampling;
  int32_t min_new_tokens = 0;
  std::vector<int32_t> end_tokens;  // suppressed until min_new_tokens were produced
  uint32_t candidate = 0;
  // Ids at positions [0, first_position), when it begins past 0 and its sampling needs counts.
  std::vector<int32_t> earlier_tokens;
};

// Runs num_tokens tokens of one sequence from first_position on. Writing there discards what lay at
// that position or later.
struct Step {
  SequenceId sequence = 0;
  int32_t first_position = 0;
  int32_t num_tokens = 0;
  std::vector<int32_t> tokens;   // [num_tokens]; empty: one token, the sequence's previous sample
  bool sample = false;           // the last row gives the next token, or, if pooled, the vector
  int32_t top_logprobs = -1;     // of the sample: -1 none, 0 its own, k: also the k best
  int32_t prompt_logprobs = -1;  // of every row, about the token after it: same meaning
  int32_t next_token = -1;       // with prompt_logprobs: the token after the last row; -1: none
  // Of every step of the sequence alike; then positions follow each other, from 0 on, and nothing
  // is told of tokens.
  Pooling pooling = Pooling::kNone;
  // With sample: only of the tokens that Engine::SetMasks allows. min_new_tokens is not looked at.
  bool masked = false;
};

// What a masked step may sample.
struct StepMask {
  int32_t step = 0;               // its index in the plan
  std::vector<uint32_t> allowed;  // [MaskWords(vocab)] bits, as SampleRow::mask
};

inline size_t MaskWords(int64_t vocab) { return static_cast<size_t>((vocab + 31) / 32); }

// Stages of a pipeline, from `begin` to before `end`; as it is made, all.
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

struct IterationPlan {
  uint64_t epoch = 0;
  uint64_t iteration = 0;  // consecutive within an epoch, from 0
  std::vector<SequenceId> releases;
  ByKind<std::vector<PageCopy>> page_copies;
  std::vector<SequenceStart> starts;
  std::vector<Step> steps;
  // Whose layers run; maybe nobody's. The caches of the others have these rows, from an epoch
  // before: they do nothing but note them, and neither copy pages; the one before the first that
  // runs sends from its replay log. If the last one does not run, no step gives anything.
  StageRange stages;

  int64_t num_tokens() const {
    int64_t sum = 0;
    for (const Step& step : steps) sum += step.num_tokens;
    return sum;
  }
};

// About one token: what log probabilities were asked.
struct TokenDetail {
  float logprob = 0;
  std::vector<TokenLogprob> top;
};

struct StepResult {
  SequenceId sequence = 0;
  int32_t token = -1;                      // -1: nothing was sampled
  TokenDetail detail;                      // of `token`, if top_logprobs >= 0
  std::vector<TokenDetail> prompt_detail;  // of the tokens after each row, if asked
  std::vector<float> embedding;            // [hidden] of a pooled step that samples
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
  IterationTimings timings;
  ExpertUse experts;  // of the last stage's layers, as rank 0 saw it
};

}  // namespace treadle
