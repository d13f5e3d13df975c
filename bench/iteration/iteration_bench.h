// ORCA's Figure 9: the engine alone. The same batch of requests runs from prompt to last token,
// with no scheduler decision in between; time per phase, tokens per second. No server, no client.
//
// On several stages the batch decodes in as many parts, one on each stage at a time; its tokens are
// then given and not the samples, which changes nothing about the work.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/plan/defaults.h"
#include "engine/plan/kv_paging.h"

namespace treadle {

struct IterationBenchOptions {
  std::vector<int32_t> prompt_tokens = {128};
  int32_t new_tokens = 32;
  std::vector<int32_t> batch_sizes = {1, 2, 4, 8, 16, 32};
  int repeats = 3;  // the median is reported
  int64_t max_batch_tokens = kDefaultBatchTokens;
  KvPaging paging;
  PageCounts total_pages;
  int32_t vocab = 0;
  uint64_t weight_bytes = 0;
  PageCounts kv_bytes_per_token;  // in all layers of a kind
  // The next iteration is submitted when the one before it has given its result: shows what the
  // host does between two, which an engine that works ahead hides.
  bool one_at_a_time = false;
  // Adapters that the engine has (Engine::LoadAdapter). Not empty: each batch runs once more, in
  // turns with the other, and its request i has adapter i, from the first again after the last.
  std::vector<uint64_t> adapters = {};
  std::function<void(double)> progress = {};  // 0 to 1; may be empty
};

struct IterationBenchRow {
  int32_t batch_size = 0;
  int32_t prompt_tokens = 0;
  int32_t new_tokens = 0;
  int32_t adapters = 0;  // that the requests of a batch had
  double prefill_tokens_per_second = 0;
  double decode_tokens_per_second = 0;
  double prefill_seconds = 0;           // whole prompts, first tokens included
  double decode_iteration_seconds = 0;  // mean of one increment iteration
  double decode_gap_seconds = 0;        // of it, IterationTimings::gap: nothing ran
  double total_seconds = 0;
  // Weights, and K/V of the mean position, that an increment iteration reads in its time; 0 where
  // the weights of experts are not known.
  double decode_gigabytes_per_second = 0;
  double decode_experts = 0;  // that each layer used in an increment iteration; 0: there are none
};

// All batch sizes with each prompt length. `engine` is started by the call and must not be used by
// anyone else.
absl::StatusOr<std::vector<IterationBenchRow>> RunIterationBench(
    Engine& engine, const IterationBenchOptions& options);

nlohmann::ordered_json ToJson(const std::vector<IterationBenchRow>& rows);
std::string ToTable(const std::vector<IterationBenchRow>& rows);

}  // namespace treadle
