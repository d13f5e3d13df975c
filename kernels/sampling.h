// Sampling as a pure function of a row of logits and a SampleRow.
//
// Order of operations: logit bias; repetition penalty (prompt and output), presence and frequency
// penalties (output); suppressed and masked tokens to -inf; temperature; top-k; top-p; min-p. Log
// probabilities are of the raw logits (before all of that). The random number is counter-based, keyed
// by (seed, candidate, position), so a token depends on nothing but its own request (N4).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace treadle {

inline constexpr int32_t kMaxTopLogprobs = 20;

struct LogitBias {
  int32_t token = 0;
  float bias = 0;
};

// One request's wishes, constant over its life. Validated where it enters (server), so every backend
// may assume: finite values, temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, repetition_penalty > 0.
struct SamplingParameters {
  float temperature = 1.0f;  // 0: greedy (the lowest id wins a tie)
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  std::vector<LogitBias> logit_bias;
  uint64_t seed = 0;  // resolved: drawn at the door when the client gave none

  bool NeedsCounts() const {
    return repetition_penalty != 1.0f || presence_penalty != 0.0f || frequency_penalty != 0.0f;
  }
};

// How often a token occurred so far; at least one of the two is positive.
struct TokenCount {
  int32_t token = 0;
  int32_t in_prompt = 0;
  int32_t in_output = 0;
};

// What one row of logits is asked.
struct SampleRow {
  const SamplingParameters* parameters = nullptr;  // null: no sample, log probabilities only
  std::span<const TokenCount> counts;              // empty unless parameters->NeedsCounts()
  std::span<const int32_t> suppressed;             // never sampled (end tokens before min_new_tokens)
  const uint32_t* mask = nullptr;                  // [ceil(vocab / 32)] bits, 1 = allowed; null: all
  uint32_t candidate = 0;
  int64_t position = 0;       // position that the sampled token will have
  int32_t top_logprobs = -1;  // -1: no log probabilities; else that many alternatives (<= 20)
  int32_t target = -1;        // with top_logprobs >= 0: its log probability is wanted; -1: none
};

struct TokenLogprob {
  int32_t token = -1;
  float logprob = 0;
};

struct SampleResult {
  int32_t token = -1;        // -1 when nothing was to be sampled
  float logprob = 0;         // of `token`, raw
  float target_logprob = 0;  // of SampleRow::target, raw
  int32_t num_top = 0;
  std::array<TokenLogprob, kMaxTopLogprobs> top;  // best first; ties: lowest id first
};

// Uniform in [0, 1), 53 bits, from Philox4x32-10 (Salmon et al., SC'11) with key = seed and
// counter = (position, candidate).
double CounterUniform(uint64_t seed, uint32_t candidate, int64_t position);

}  // namespace treadle
