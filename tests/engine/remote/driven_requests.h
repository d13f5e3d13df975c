// Requests that are run through an engine, and what a LocalEngine makes of the same plans.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/local_engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/checkpoints/checkpoint.h"
#include "tests/engine/engine_runner.h"
#include "tests/support/ranks/one_rank.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {

// Greedy and drawn, with counts, log probabilities and several candidates.
inline std::vector<PlanDriver::DrivenRequest> SomeRequests(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<PlanDriver::DrivenRequest> requests;
  for (int i = 0; i < count; ++i) {
    PlanDriver::DrivenRequest driven;
    AloneRequest& request = driven.request;
    request.prompt.resize(1 + random() % 40);
    for (int32_t& token : request.prompt) token = static_cast<int32_t>(random() % 256);
    request.max_new_tokens = 1 + static_cast<int32_t>(random() % 12);
    request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.9f;
    request.sampling.seed = random();
    if (i % 3 == 0) request.sampling.repetition_penalty = 1.2f;
    if (i % 4 == 1) request.top_logprobs = 2;
    if (i % 4 == 2) request.prompt_logprobs = 1;
    driven.candidates = i % 5 == 4 ? 2 : 1;
    requests.push_back(std::move(driven));
  }
  return requests;
}

// So many pages of each kind that there is.
inline PageCounts PagesOf(const KvPaging& paging, int64_t pages) {
  return {paging.whole ? pages : 0, paging.ring > 0 ? pages : 0};
}

inline PlanDriver::Options DriverOptions(uint32_t seed, int stages = 1,
                                         const KvPaging& paging = {.page_size = 16}) {
  PlanDriver::Options options;
  options.paging = paging;
  options.num_pages = PagesOf(paging, 64);
  options.max_batch_tokens = 64;
  options.seed = seed;
  options.one_plan_each = stages > 1;
  return options;
}

// A LocalEngine with all layers of the model, on one thread, as QuickOptions has it.
inline absl::StatusOr<std::unique_ptr<Engine>> MakeLocalEngine(
    const std::string& model, int depth, ComputeMode compute = ComputeMode::kExact) {
  CpuBackendOptions cpu;
  cpu.threads = 1;
  cpu.compute = compute;
  TREADLE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(model));
  TREADLE_ASSIGN_OR_RETURN(auto backend, CreateCpuBackend(cpu));
  LoadOptions load;
  load.max_batch_tokens = 64;
  TREADLE_ASSIGN_OR_RETURN(auto loaded, Model::Load(*checkpoint, *backend, load));
  LocalEngineOptions options;
  options.max_batch_tokens = 64;
  options.page_size = 16;
  options.kv_pages =
      PagesOf(KvPaging::Of(checkpoint->config(), options.page_size, options.max_batch_tokens), 64);
  options.kv_dtype = DType::kF32;
  options.depth = depth;
  return OneRankEngine(std::move(backend), std::move(loaded), options);
}

// Differences between the answers of two drivers of the same requests, bit by bit; or nothing.
inline std::string DifferentAnswers(const PlanDriver& a, const PlanDriver& b,
                                    const std::vector<PlanDriver::DrivenRequest>& requests) {
  for (size_t i = 0; i < requests.size(); ++i) {
    for (int32_t candidate = 0; candidate < requests[i].candidates; ++candidate) {
      const AloneAnswer& x = a.answer(i, static_cast<uint32_t>(candidate));
      const AloneAnswer& y = b.answer(i, static_cast<uint32_t>(candidate));
      std::string difference;
      if (x.tokens != y.tokens) {
        difference =
            Str(testing::PrintToString(x.tokens), " and ", testing::PrintToString(y.tokens));
      }
      if (difference.empty()) difference = Difference(x.details, y.details);
      if (difference.empty()) difference = Difference(x.prompt_details, y.prompt_details);
      if (!difference.empty()) return Str("request ", i, ": ", difference);
    }
  }
  return "";
}

}  // namespace treadle
