// Learns what iterations cost before there is a request: runs a few plans of dummy sequences, of
// 1 to 32 sequences with a token each and of up to 512 tokens of one prompt, as far as they fit
// into a budget of time, which begins after a first one of one token. Whatever the engine is, it is
// asked through its interface.
//
// Thread safety: call from the thread that uses the engine, between Start and the first plan.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "scheduler/cost/iteration_cost.h"

namespace treadle {

struct Calibration {
  KvPaging paging;
  PageCounts pages;
  int32_t vocab = 0;
  int64_t max_batch_tokens = 0;
  int64_t max_context = 0;
  // Seconds that iterations may take in all, as the engine says. Two of one token run even so.
  double budget = 0.3;
  // Blocks until the engine has news, or until then at the latest.
  std::function<void(std::chrono::steady_clock::time_point)> wait = {};
};

// Returns how many plans were submitted; the epoch goes on with the next iteration's number, and no
// sequence is left. An error if the engine does not stand, or no longer: its epoch is over, or must
// be ended.
absl::StatusOr<uint64_t> Calibrate(Engine& engine, const Calibration& how, IterationCost& cost);

}  // namespace treadle
