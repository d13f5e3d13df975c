// One request, alone: the plain twin of the engine.
//
// Runs Model and Backend directly, one sequence in a cache of its own, one output row at a time,
// and works out everything else (token counts, suppressed tokens) from the whole list of ids each
// time. What the engine gives a request in any company and in any chunks must equal this, bit for
// bit.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/kv/kv_cache.h"
#include "engine/plan/iteration_plan.h"
#include "kernels/backend.h"
#include "models/model.h"

namespace treadle {

struct AloneRequest {
  std::vector<int32_t> prompt;
  SamplingParameters sampling;
  uint32_t candidate = 0;
  int32_t max_new_tokens = 1;
  int32_t min_new_tokens = 0;
  std::vector<int32_t> end_tokens;  // the answer ends with any of them
  int32_t top_logprobs = -1;
  int32_t prompt_logprobs = -1;
  uint64_t adapter = 0;  // SequenceStart's
};

struct AloneAnswer {
  std::vector<int32_t> tokens;
  std::vector<TokenDetail> details;         // of each token, if asked
  std::vector<TokenDetail> prompt_details;  // of prompt tokens 1 and up, if asked
};

class ReferenceRunner {
 public:
  // Holds `max_tokens` of one request. Backend and model outlive the runner; nothing else uses them
  // during Run.
  ReferenceRunner(Backend& backend, Model& model, int64_t max_tokens, int64_t page_size,
                  DType kv_dtype);

  // The adapters that requests may name.
  void Add(uint64_t id, std::shared_ptr<const Adapter> adapter) {
    adapters_[id] = std::move(adapter);
  }
  // The prompt in chunks of `chunk` tokens.
  AloneAnswer Run(const AloneRequest& request, int64_t chunk);

 private:
  void Forward(const AloneRequest& request, std::span<const int32_t> ids, int64_t first_position,
               int64_t end);
  // The adapter of so many rows; empty: the request names none.
  std::vector<const Adapter*> AdaptersOf(const AloneRequest& request, int64_t rows) const;
  SampleResult Output(const AloneRequest& request, std::span<const int32_t> ids, int64_t row,
                      bool sample, int32_t target);

  Backend& backend_;
  Model& model_;
  KvCache cache_;
  std::map<uint64_t, std::shared_ptr<const Adapter>> adapters_;
  std::vector<int32_t> pages_;
  Buffer hidden_;       // [max_tokens, hidden]
  Buffer head_hidden_;  // [1, hidden]
  Buffer logits_;       // [1, vocab]
};

// Difference of two details, compared bit by bit; empty if they are equal.
std::string Difference(const std::vector<TokenDetail>& a, const std::vector<TokenDetail>& b);

}  // namespace treadle
