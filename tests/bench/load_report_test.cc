#include "bench/load/load_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace treadle {
namespace {

// Two requests worked by hand: scheduled at 1 s, tokens at 1.5, 1.6 and 1.9 s; scheduled at 2 s,
// one token at 2.4 s; and one that failed.
LoadResult Example() {
  LoadResult result;
  result.duration = 4;
  LoadRecord first{1.0, 10, 3, {1.5, 1.6, 1.9}, 2.0, ""};
  LoadRecord second{2.0, 20, 1, {2.4}, 2.4, ""};
  LoadRecord failed{3.0, 30, 0, {}, 3.1, "code 8: full"};
  result.requests = {first, second, failed};
  return result;
}

TEST(LoadReport, CountsFromTheScheduledArrival) {
  const LoadReport report = Analyze(Example(), {});
  EXPECT_EQ(report.completed, 2);
  EXPECT_EQ(report.failed, 1);
  EXPECT_EQ(report.total_input_tokens, 30);
  EXPECT_EQ(report.total_output_tokens, 4);
  EXPECT_DOUBLE_EQ(report.request_throughput, 0.5);
  EXPECT_DOUBLE_EQ(report.output_throughput, 1.0);
  using ::testing::DoubleNear;
  using ::testing::ElementsAre;
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
  EXPECT_EQ(Analyze(Example(), {{"ttft", 450}}).good, 1);
  EXPECT_EQ(Analyze(Example(), {{"ttft", 600}, {"tpot", 300}}).good, 2);
  EXPECT_EQ(Analyze(Example(), {{"e2el", 10}}).good, 0);
  EXPECT_EQ(Analyze(Example(), {}).good, -1);
}

TEST(LoadReport, JsonHasTheKeysThatOtherToolsRead) {
  const LoadResult result = Example();
  const auto json = nlohmann::json::parse(ToJson(Analyze(result, {}), result, true, {90, 99}, {}));
  for (const char* key :
       {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "output_throughput", "total_token_throughput", "input_lens",
        "output_lens", "ttfts", "itls", "errors", "mean_ttft_ms", "median_tpot_ms", "std_itl_ms",
        "p99_e2el_ms", "p90_ttft_ms", "median_normalized_latency_ms"}) {
    EXPECT_TRUE(json.contains(key)) << key;
  }
  EXPECT_EQ(json["errors"][2], "code 8: full");
}

TEST(Percentile, InterpolatesBetweenOrderStatistics) {
  EXPECT_DOUBLE_EQ(Percentile({1, 2, 3, 4}, 50), 2.5);
  EXPECT_DOUBLE_EQ(Percentile({1, 2, 3, 4}, 99), 3.97);  // numpy.percentile([1, 2, 3, 4], 99)
  EXPECT_DOUBLE_EQ(Percentile({7}, 99), 7);
  EXPECT_DOUBLE_EQ(Percentile({}, 50), 0);
}

}  // namespace
}  // namespace treadle
