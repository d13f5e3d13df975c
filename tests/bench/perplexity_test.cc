#include "bench/quality/perplexity.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/bench/quality_case.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr auto kWindow = PerplexityProtocol::kWindow;
constexpr auto kLlamaCpp = PerplexityProtocol::kLlamaCpp;

TEST(PerplexityPlan, WindowScoresAllTokensButTheFirstOfEachWindow) {
  const auto plan = PlanPerplexity(kWindow, 0, 8192, /*tokens=*/5000, 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->context, 2048);
  EXPECT_EQ(plan->windows, 2);  // the rest is dropped
  EXPECT_EQ(plan->first_predicted, 1);
  EXPECT_EQ(plan->scored(), 2 * 2047);
}

TEST(PerplexityPlan, LlamaCppScoresTheSecondHalfOfEachChunk) {
  const auto plan = PlanPerplexity(kLlamaCpp, 0, 8192, /*tokens=*/4100, 0);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->context, 512);
  EXPECT_EQ(plan->windows, 8);
  // llama-perplexity counts n_ctx - n_ctx / 2 - 1 tokens of a chunk.
  EXPECT_EQ(plan->scored(), 8 * 255);
  const auto odd = PlanPerplexity(kLlamaCpp, 33, 8192, /*tokens=*/70, 0);
  ASSERT_TRUE(odd.ok()) << odd.status();
  EXPECT_EQ(odd->scored(), 2 * (33 - 33 / 2 - 1));
}

TEST(PerplexityPlan, ContextAndTokensAreCapped) {
  EXPECT_EQ(PlanPerplexity(kWindow, 0, 96, 1000, 0)->context, 96);
  EXPECT_EQ(PlanPerplexity(kLlamaCpp, 0, 96, 1000, 0)->context, 96);
  EXPECT_EQ(PlanPerplexity(kWindow, 10, 96, 1000, 35)->windows, 3);
}

TEST(PerplexityPlan, RefusesWhatCannotBe) {
  const auto message = [](auto protocol, int64_t context, int64_t model, int64_t tokens,
                          int64_t max_tokens) {
    const auto plan = PlanPerplexity(protocol, context, model, tokens, max_tokens);
    EXPECT_TRUE(absl::IsInvalidArgument(plan.status()));
    return std::string(plan.status().message());
  };
  EXPECT_THAT(message(kWindow, 97, 96, 1000, 0), HasSubstr("--context is 97, expected 2 to 96"));
  EXPECT_THAT(message(kWindow, 1, 96, 1000, 0), HasSubstr("--context is 1, expected 2"));
  EXPECT_THAT(message(kLlamaCpp, 3, 96, 1000, 0), HasSubstr("--context is 3, expected 4"));
  EXPECT_THAT(message(kWindow, 0, 8192, 2047, 0),
              HasSubstr("too short: 2047 tokens, expected at least 2048"));
  EXPECT_THAT(message(kWindow, 64, 8192, 5000, 63), HasSubstr("63 tokens, expected at least 64"));
  EXPECT_THAT(message(kLlamaCpp, 0, 8192, 1023, 0), HasSubstr("expected at least 1024"));
}

// Losses that transformers computes for the same checkpoint, tokens and protocol.
class PerplexityOracle : public testing::TestWithParam<std::string> {};

TEST_P(PerplexityOracle, EveryWindowsLossEqualsTransformers) {
  std::ifstream file(std::string(TREADLE_TESTDATA) + "/perplexity.json");
  const nlohmann::json oracle = nlohmann::json::parse(file);
  const nlohmann::json& expected = oracle["cases"][GetParam()];
  const std::vector<int32_t> tokens = expected["token_ids"];
  const int64_t context = oracle["context"];
  const auto checkpoint = SmallCheckpoint(GetParam());
  const auto model = ExactModel(*checkpoint, context);
  for (const auto protocol : {kWindow, kLlamaCpp}) {
    const auto name = WordOf(kPerplexityProtocols, protocol);
    SCOPED_TRACE(name);
    const auto plan = PlanPerplexity(protocol, context, checkpoint->config().context,
                                     static_cast<int64_t>(tokens.size()), 0);
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<ScoredToken> scored;
    const PerplexityReport report = MeasurePerplexity(
        *model, tokens, *plan, oracle["bos"],
        {.progress = {}, .scored = [&](const ScoredToken& token) { scored.push_back(token); }});

    const std::vector<double> losses = expected[std::string(name)];
    ASSERT_EQ(plan->windows, static_cast<int64_t>(losses.size()));
    ASSERT_EQ(plan->scored(), static_cast<int64_t>(scored.size()));
    std::vector<double> sums(losses.size());
    double total = 0, squares = 0;
    for (size_t i = 0; i < scored.size(); ++i) {
      const ScoredToken& token = scored[i];
      const auto per_window = static_cast<int64_t>(scored.size()) / plan->windows;
      EXPECT_EQ(token.window, static_cast<int64_t>(i) / per_window);
      EXPECT_EQ(token.position, plan->first_predicted + static_cast<int64_t>(i) % per_window);
      EXPECT_EQ(token.token, tokens[token.window * context + token.position]);
      sums[token.window] -= token.log_probability;
      total -= token.log_probability;
      squares += token.log_probability * token.log_probability;
    }
    // Two computations in 32 bits, each as far from the exact one as transformers' own.
    const double tolerance = 2 * expected["fp32_rounding"].get<double>();
    for (size_t w = 0; w < losses.size(); ++w) EXPECT_NEAR(sums[w], losses[w], tolerance);

    // The textbook formulas, which llama-perplexity uses.
    const auto count = static_cast<double>(scored.size());
    const double mean = total / count;
    EXPECT_NEAR(report.mean_loss, mean, 1e-12 * mean);
    const double error = std::sqrt((squares / count - mean * mean) / (count - 1));
    EXPECT_NEAR(report.standard_error, error, 1e-9 * error);
    EXPECT_DOUBLE_EQ(report.perplexity(), std::exp(report.mean_loss));
    EXPECT_LT(report.low(), report.perplexity());
    EXPECT_GT(report.high(), report.perplexity());
  }
}

INSTANTIATE_TEST_SUITE_P(SmallModels, PerplexityOracle, testing::Values("llama-grouped", "gpt2"),
                         [](const auto& info) {
                           return info.param == "gpt2" ? std::string("Gpt2") : std::string("Llama");
                         });

TEST(PerplexityReport, JsonSaysTheProtocol) {
  PerplexityReport report;
  report.plan = {.protocol = kLlamaCpp, .context = 16, .windows = 2, .first_predicted = 9};
  report.mean_loss = std::log(20.0);
  report.standard_error = 0.01;
  const auto json = ToJson(report);
  EXPECT_EQ(json["protocol"], "llama.cpp");
  EXPECT_EQ(json["scored_tokens"], 14);
  EXPECT_NEAR(json["perplexity"].get<double>(), 20, 1e-9);
  EXPECT_NEAR(json["perplexity_error"].get<double>(), 0.2, 1e-9);
}

TEST(LogSumExp, SurvivesLargeLogits) {
  EXPECT_DOUBLE_EQ(LogSumExp(std::vector<float>{1000, 1000}), 1000 + std::log(2.0));
  EXPECT_DOUBLE_EQ(LogSumExp(std::vector<float>{-1000}), -1000);
}

TEST(EncodeTextFile, SaysWhatIsMissing) {
  const auto checkpoint = SmallCheckpoint("llama-grouped");
  const auto tokens = EncodeTextFile(*checkpoint, "any");
  EXPECT_TRUE(absl::IsInvalidArgument(tokens.status()));
  EXPECT_THAT(std::string(tokens.status().message()), HasSubstr("no tokenizer"));
}

}  // namespace
}  // namespace treadle
