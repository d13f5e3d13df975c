#include "bench/load/load_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Two requests worked by hand: scheduled at 1 s, sent 0.2 s later, tokens at 1.5, 1.6 and 1.9 s;
// scheduled at 2 s, sent at once, one token at 2.4 s; and one that failed.
LoadResult Example() {
  LoadResult result;
  result.duration = 4;
  LoadRecord first{1.0, 10, 3, {1.5, 1.6, 1.9}, 2.0, "", 1.2, 0.0004};
  LoadRecord second{2.0, 20, 1, {2.4}, 2.4, "", 2.0, 0.0002};
  LoadRecord failed{3.0, 30, 0, {}, 3.1, "code 8: full", 3.0, 0};
  result.requests = {first, second, failed};
  return result;
}

LoadReport WithGoodput(const LoadResult& result, std::map<std::string, double> bounds) {
  return Analyze(result, {.goodput = std::move(bounds)});
}

TEST(LoadReport, CountsFromTheScheduledArrival) {
  const LoadReport report = Analyze(Example(), {});
  EXPECT_EQ(report.completed, 2);
  EXPECT_EQ(report.failed, 1);
  EXPECT_EQ(report.total_input_tokens, 30);
  EXPECT_EQ(report.total_output_tokens, 4);
  EXPECT_DOUBLE_EQ(report.request_throughput, 0.5);
  EXPECT_DOUBLE_EQ(report.output_throughput, 1.0);
  EXPECT_THAT(report.samples_ms.at("ttft"),
              ElementsAre(DoubleNear(500, 1e-9), DoubleNear(400, 1e-9)));
  EXPECT_THAT(report.samples_ms.at("e2el"),
              ElementsAre(DoubleNear(1000, 1e-9), DoubleNear(400, 1e-9)));
  EXPECT_THAT(report.samples_ms.at("tpot"), ElementsAre(DoubleNear(250, 1e-9)));
  EXPECT_THAT(report.samples_ms.at("itl"),
              ElementsAre(DoubleNear(100, 1e-9), DoubleNear(300, 1e-9)));
  EXPECT_THAT(report.samples_ms.at("normalized_latency"),
              ElementsAre(DoubleNear(1000.0 / 3, 1e-9), DoubleNear(400, 1e-9)));
}

TEST(LoadReport, GoodputCountsRequestsWithinEveryBound) {
  EXPECT_EQ(WithGoodput(Example(), {{"ttft", 450}}).good, 1);
  EXPECT_EQ(WithGoodput(Example(), {{"ttft", 600}, {"tpot", 300}}).good, 2);
  EXPECT_EQ(WithGoodput(Example(), {{"e2el", 10}}).good, 0);
  EXPECT_EQ(Analyze(Example(), {}).good, -1);
}

// Buckets of a second from the first request's sending on (1.2 s): three tokens, then one. An end
// at the time of a begin comes first.
TEST(LoadReport, PeaksAreThoseOfVllm) {
  LoadResult result = Example();
  EXPECT_EQ(Analyze(result, {}).max_output_tokens_per_s, 3);
  EXPECT_EQ(Analyze(result, {}).max_concurrent_requests, 1);
  result.requests[1].sent = 1.9;
  result.requests[1].token_times = {2.1};
  EXPECT_EQ(Analyze(result, {}).max_output_tokens_per_s, 4);
  EXPECT_EQ(Analyze(result, {}).max_concurrent_requests, 2);
}

// From 1.55 s to the last arrival, at 3 s: latencies of the second request, which arrives there;
// two tokens of the first one and its end, and all of the second.
TEST(LoadReport, TheSteadyStateAloneCountsWhereItIsAsked) {
  const LoadReport report = Analyze(Example(), {.steady_from = 1.55});
  EXPECT_DOUBLE_EQ(report.duration, 1.45);
  EXPECT_EQ(report.completed, 1);
  EXPECT_EQ(report.failed, 1);
  EXPECT_THAT(report.samples_ms.at("ttft"), ElementsAre(DoubleNear(400, 1e-9)));
  EXPECT_DOUBLE_EQ(report.request_throughput, 2 / 1.45);
  EXPECT_DOUBLE_EQ(report.output_throughput, 3 / 1.45);
  EXPECT_DOUBLE_EQ(report.total_token_throughput, (3 + 30) / 1.45);
}

TEST(LoadReport, AClientThatWasLateSaysSo) {
  LoadResult result = Example();
  EXPECT_FALSE(Analyze(result, {}).client_was_late);
  result.requests[0].lag = 0.03;  // 5 % of the median time to first token is 22.5 ms
  EXPECT_TRUE(Analyze(result, {}).client_was_late);
  EXPECT_THAT(ToTable(Analyze(result, {}), {}), HasSubstr("THE CLIENT WAS LATE"));
  result.requests[0].lag = 0.02;
  EXPECT_FALSE(Analyze(result, {}).client_was_late);
  EXPECT_THAT(ToTable(Analyze(result, {}), {}), Not(HasSubstr("LATE")));
}

// The keys of vLLM's `benchmark` and `main_async` (vllm/benchmarks/serve.py), but for
// generated_texts and rtfx, which are of texts and of speech.
TEST(LoadReport, JsonHasTheKeysThatOtherToolsRead) {
  const LoadResult result = Example();
  const Json json = ToJson(Analyze(result, {}), result, true, {}, {{"label", "x"}});
  for (const char* key : {"duration",
                          "completed",
                          "failed",
                          "total_input_tokens",
                          "total_output_tokens",
                          "request_throughput",
                          "request_goodput",
                          "output_throughput",
                          "total_token_throughput",
                          "input_lens",
                          "output_lens",
                          "ttfts",
                          "itls",
                          "latencies",
                          "start_times",
                          "queue_times",
                          "errors",
                          "max_output_tokens_per_s",
                          "max_concurrent_requests",
                          "mean_ttft_ms",
                          "median_tpot_ms",
                          "std_itl_ms",
                          "p99_e2el_ms",
                          "p90_ttft_ms",
                          "median_normalized_latency_ms",
                          "p99_client_lag_ms",
                          "label"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["errors"][2], "code 8: full");
  EXPECT_TRUE(json["request_goodput"].is_null());
  // vLLM's plots rely on this: the first token comes at start_times + ttfts.
  EXPECT_DOUBLE_EQ(json["start_times"][0].get<double>() + json["ttfts"][0].get<double>(), 1.5);
  EXPECT_NEAR(json["queue_times"][0].get<double>(), 0.2, 1e-9);
  EXPECT_FALSE(ToJson(Analyze(result, {}), result, false, {}, {}).contains("ttfts"));
}

// scipy.stats.t.interval(0.95, 2, 4, scipy.stats.sem([2, 4, 6])): 4 +- 4.968; and with 13 values
// t is 2.1788.
TEST(MeanOverSeeds, HasTheConfidenceIntervalOfStudent) {
  const Json means = MeanOverSeeds({{{"seed", 1}, {"x", 2}, {"name", "a"}},
                                    {{"seed", 2}, {"x", 4}, {"name", "a"}},
                                    {{"seed", 3}, {"x", 6}, {"name", "a"}}});
  EXPECT_EQ(means["x"], 4.0);
  EXPECT_NEAR(means["ci95_x"].get<double>(), 4.968, 1e-3);
  EXPECT_EQ(means["name"], "a");
  EXPECT_EQ(means["seeds"], 3);
  EXPECT_FALSE(means.contains("ci95_seed"));
  EXPECT_THAT(ToTable(means), HasSubstr("4.000 +- 4.968"));
  std::vector<Json> many;
  for (int i = 0; i < 13; ++i) many.push_back({{"x", i}});  // deviation sqrt(91 / 6)
  EXPECT_NEAR(MeanOverSeeds(many)["ci95_x"].get<double>(), 2.1788 * std::sqrt(91.0 / 6 / 13), 1e-3);
}

TEST(Percentile, InterpolatesBetweenOrderStatistics) {
  EXPECT_DOUBLE_EQ(Percentile({1, 2, 3, 4}, 50), 2.5);
  EXPECT_DOUBLE_EQ(Percentile({1, 2, 3, 4}, 99), 3.97);  // numpy.percentile([1, 2, 3, 4], 99)
  EXPECT_DOUBLE_EQ(Percentile({7}, 99), 7);
  EXPECT_DOUBLE_EQ(Percentile({}, 50), 0);
}

}  // namespace
}  // namespace treadle
