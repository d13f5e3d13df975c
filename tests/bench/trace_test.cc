#include "bench/load/trace.h"

#include <gtest/gtest.h>

#include <cmath>

namespace treadle {
namespace {

TEST(SyntheticTrace, PoissonGapsHaveTheMeanAndSpreadOfAnExponential) {
  SyntheticTrace options;
  options.num_requests = 20000;
  options.request_rate = 4;
  const auto trace = MakeTrace(options);
  double sum = 0, squares = 0;
  for (size_t i = 1; i < trace.size(); ++i) {
    const double gap = trace[i].arrival - trace[i - 1].arrival;
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
  }
  const double n = static_cast<double>(trace.size() - 1), mean = sum / n;
  const double deviation = std::sqrt(squares / n - mean * mean);
  // Five standard errors of the mean and of the deviation of an exponential.
  EXPECT_NEAR(mean, 0.25, 5 * 0.25 / std::sqrt(n));
  EXPECT_NEAR(deviation, 0.25, 5 * 0.25 * std::sqrt(2 / n));
}

TEST(SyntheticTrace, BurstinessKeepsTheRateAndSetsTheSpread) {
  for (double shape : {0.25, 4.0}) {
    SyntheticTrace options;
    options.num_requests = 40000;
    options.request_rate = 10;
    options.burstiness = shape;
    const auto trace = MakeTrace(options);
    const double n = static_cast<double>(trace.size() - 1);
    const double mean = trace.back().arrival / n;
    double variance = 0;
    for (size_t i = 1; i < trace.size(); ++i) {
      variance += std::pow(trace[i].arrival - trace[i - 1].arrival - mean, 2) / n;
    }
    EXPECT_NEAR(mean, 0.1, 5 * 0.1 / std::sqrt(shape * n)) << shape;
    // Squared coefficient of variation of a gamma is 1 / shape; its estimate's error is below 10 %.
    EXPECT_NEAR(variance / (mean * mean), 1 / shape, 0.1 / shape) << shape;
  }
}

TEST(SyntheticTrace, LengthsCoverTheirRangeAndSeedsRepeat) {
  SyntheticTrace options;
  options.num_requests = 5000;
  options.input = {3, 5};
  options.output = {7, 7};
  const auto trace = MakeTrace(options), again = MakeTrace(options);
  int seen[3] = {};
  for (size_t i = 0; i < trace.size(); ++i) {
    ASSERT_GE(trace[i].input_tokens, 3);
    ASSERT_LE(trace[i].input_tokens, 5);
    ASSERT_EQ(trace[i].output_tokens, 7);
    ASSERT_EQ(trace[i].arrival, again[i].arrival);
    ++seen[trace[i].input_tokens - 3];
  }
  for (int count : seen) EXPECT_GT(count, 1400);
  options.request_rate = 0;
  for (const TraceEntry& entry : MakeTrace(options)) ASSERT_EQ(entry.arrival, 0);
}

TEST(SyntheticTrace, FixedGapsAreEqual) {
  SyntheticTrace options;
  options.num_requests = 5;
  options.request_rate = 4;
  options.burstiness = INFINITY;
  const auto trace = MakeTrace(options);
  for (size_t i = 0; i < trace.size(); ++i) EXPECT_DOUBLE_EQ(trace[i].arrival, 0.25 * i);
}

// Mean and deviation are those of the lengths, not of their logarithms.
TEST(SyntheticTrace, LogNormalLengthsHaveTheirMeanAndDeviation) {
  SyntheticTrace options;
  options.num_requests = 40000;
  options.input = *ParseLengthRange("lognormal:200:100");
  options.output = *ParseLengthRange("lognormal:200:100:250");
  const auto trace = MakeTrace(options);
  const double n = static_cast<double>(trace.size());
  double mean = 0, variance = 0, kurtosis = 0, logs = 0;
  for (const TraceEntry& entry : trace) {
    mean += entry.input_tokens / n;
    logs += std::log(entry.input_tokens) / n;
    EXPECT_LE(entry.output_tokens, 250);
  }
  for (const TraceEntry& entry : trace) {
    variance += std::pow(entry.input_tokens - mean, 2) / n;
    kurtosis += std::pow(entry.input_tokens - mean, 4) / n;
  }
  // Five standard errors.
  EXPECT_NEAR(mean, 200, 5 * 100 / std::sqrt(n));
  EXPECT_NEAR(variance, 10000, 5 * std::sqrt((kurtosis - variance * variance) / n));
  // The logarithm's mean is ln 200 - ln(1.25) / 2; its deviation sqrt(ln 1.25) = 0.472.
  EXPECT_NEAR(logs, std::log(200) - std::log(1.25) / 2, 5 * 0.472 / std::sqrt(n));
}

TEST(SyntheticTrace, ASeedsGapsDoNotDependOnLengths) {
  SyntheticTrace options;
  options.num_requests = 50;
  const auto trace = MakeTrace(options);
  std::vector<TraceEntry> other(50, TraceEntry{7, 1, 1});
  other[9].after = 3;
  Schedule(options, other);
  EXPECT_EQ(other[9].arrival, 7) << "a later turn's is its own";
  for (int i = 0; i < 9; ++i) EXPECT_EQ(other[i].arrival, trace[i].arrival);
}

TEST(LengthRange, ParsesAndRejects) {
  EXPECT_EQ(ParseLengthRange("32:512")->high, 512);
  EXPECT_EQ(ParseLengthRange("128")->low, 128);
  EXPECT_EQ(ParseLengthRange("lognormal:9.5:0.1:10")->high, 10);
  for (const char* bad :
       {"", "0", "5:4", "a", "1:", "1.5", "-1", "1:2:3", "nan", "4294967297", "lognormal",
        "lognormal:5", "lognormal:0:1", "lognormal:5:0", "lognormal:5:-1", "lognormal:5:nan",
        "lognormal:5:1:4", "lognormal:5:1:9:9", "lognormal:inf:1"}) {
    EXPECT_FALSE(ParseLengthRange(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace treadle
