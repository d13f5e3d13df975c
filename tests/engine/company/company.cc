#include "tests/engine/company/company.h"

#include <gtest/gtest.h>

#include "tests/engine/engine_runner.h"
#include "tests/support/assert_ok.h"
#include "tests/support/ranks/one_rank.h"

namespace treadle {
namespace {

// A float in [low, high), from the generator's own bits so that it is the same everywhere.
float Uniform(std::mt19937& random, float low, float high) {
  return low + (high - low) * static_cast<float>(random() >> 8) * 0x1p-24f;
}

SamplingParameters RandomSampling(std::mt19937& random, int32_t vocab) {
  SamplingParameters sampling;
  sampling.seed = random();
  sampling.temperature = random() % 3 == 0 ? 0.0f : Uniform(random, 0.5f, 1.5f);
  if (random() % 3 == 0) sampling.top_k = static_cast<int32_t>(1 + random() % 20);
  if (random() % 3 == 0) sampling.top_p = Uniform(random, 0.3f, 1.0f);
  if (random() % 4 == 0) sampling.min_p = Uniform(random, 0.0f, 0.2f);
  if (random() % 2 == 0) {
    sampling.repetition_penalty = Uniform(random, 0.8f, 1.5f);
    sampling.presence_penalty = Uniform(random, -1.0f, 1.0f);
    sampling.frequency_penalty = Uniform(random, -1.0f, 1.0f);
  }
  if (random() % 4 == 0) {
    sampling.logit_bias = {{static_cast<int32_t>(random() % vocab), Uniform(random, -5, 5)}};
  }
  return sampling;
}

void ExpectSame(const AloneAnswer& alone, const AloneAnswer& together, const std::string& what) {
  SCOPED_TRACE(what);
  EXPECT_EQ(alone.tokens, together.tokens);
  EXPECT_EQ(Difference(alone.details, together.details), "");
  EXPECT_EQ(Difference(alone.prompt_details, together.prompt_details), "");
}

}  // namespace

std::vector<PlanDriver::DrivenRequest> RandomRequests(uint32_t seed, int count, int32_t vocab,
                                                      int32_t max_prompt, int32_t max_new_tokens) {
  std::mt19937 random(seed);
  std::vector<PlanDriver::DrivenRequest> requests(count);
  for (PlanDriver::DrivenRequest& driven : requests) {
    AloneRequest& request = driven.request;
    request.prompt.resize(1 + random() % max_prompt);
    for (int32_t& id : request.prompt) id = static_cast<int32_t>(random() % vocab);
    if (random() % 2 == 0) {  // begins as another one does
      const std::vector<int32_t>& other = requests[random() % count].request.prompt;
      const size_t alike = std::min(other.size(), request.prompt.size());
      std::copy_n(other.begin(), alike - random() % (alike / 4 + 1), request.prompt.begin());
    }
    request.sampling = RandomSampling(random, vocab);
    request.max_new_tokens = static_cast<int32_t>(1 + random() % max_new_tokens);
    if (random() % 3 == 0) {
      request.min_new_tokens = static_cast<int32_t>(random() % (request.max_new_tokens + 1));
      for (int i = 0; i < 3; ++i) {
        request.end_tokens.push_back(static_cast<int32_t>(random() % vocab));
      }
    }
    if (random() % 2 == 0) request.top_logprobs = static_cast<int32_t>(random() % 6);
    if (random() % 3 == 0) request.prompt_logprobs = static_cast<int32_t>(random() % 6);
    if (random() % 4 == 0) driven.candidates = static_cast<int32_t>(2 + random() % 3);
  }
  return requests;
}

void ExpectCompanyDoesNotMatter(const RankFactory& rank, const LocalEngineOptions& options,
                                const std::vector<PlanDriver::DrivenRequest>& requests,
                                uint32_t seed) {
  std::unique_ptr<Backend> engine_backend = rank.backend();
  std::unique_ptr<Model> engine_model = rank.model(*engine_backend);
  PlanDriver driver(
      {.paging = KvPaging::Of(engine_model->config(), options.page_size, options.max_batch_tokens),
       .num_pages = options.kv_pages,
       .max_batch_tokens = options.max_batch_tokens,
       .seed = seed},
      requests);
  {
    ASSERT_OK_AND_ASSIGN(
        auto engine, OneRankEngine(std::move(engine_backend), std::move(engine_model), options));
    EngineRunner(std::move(engine)).RunAll(driver);
  }
  EXPECT_EQ(driver.free_pages(), options.kv_pages);

  const std::unique_ptr<Backend> backend = rank.backend();
  const std::unique_ptr<Model> model = rank.model(*backend);
  ReferenceRunner alone(*backend, *model, options.max_batch_tokens, 64, options.kv_dtype);
  for (size_t i = 0; i < requests.size(); ++i) {
    for (int32_t candidate = 0; candidate < requests[i].candidates; ++candidate) {
      AloneRequest request = requests[i].request;
      request.candidate = static_cast<uint32_t>(candidate);
      if (candidate > 0) request.prompt_logprobs = -1;  // candidate 0 has them
      const std::string what = Str("request ", i, ", candidate ", candidate, ", seed ", seed);
      const AloneAnswer whole = alone.Run(request, static_cast<int64_t>(request.prompt.size()));
      ExpectSame(whole, driver.answer(i, candidate), what);
      if (candidate == 0) ExpectSame(whole, alone.Run(request, 1), what + ", token by token");
    }
  }
}

}  // namespace treadle
