// N1 and N2 at engine level (docs/design.md, Numerics): whatever company a request runs in, and
// however its prompt is cut, it gets the tokens and log probabilities that it gets alone, bit for
// bit.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/local_engine.h"
#include "tests/engine/plan_driver.h"

namespace treadle {

// How to make a fresh rank: the engine and the reference each get their own.
struct RankFactory {
  std::function<std::unique_ptr<Backend>()> backend;
  std::function<std::unique_ptr<Model>(Backend&)> model;
};

// Requests of every kind: greedy and sampled, with and without penalties, bias, end tokens, minimum
// lengths, candidates and log probabilities. Prompts have 1 to max_prompt tokens.
std::vector<PlanDriver::DrivenRequest> RandomRequests(uint32_t seed, int count, int32_t vocab,
                                                      int32_t max_prompt, int32_t max_new_tokens);

// Runs them together through a LocalEngine by random plans, and each alone (the whole prompt at
// once, and token by token), and expects the same answers, and all pages back.
void ExpectCompanyDoesNotMatter(const RankFactory& rank, const LocalEngineOptions& options,
                                const std::vector<PlanDriver::DrivenRequest>& requests,
                                uint32_t seed);

}  // namespace treadle
