#include "bench/load/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

namespace treadle {
namespace {

using ::testing::HasSubstr;

std::string WriteFile(const std::string& name, const std::string& content) {
  const std::string path = ::testing::TempDir() + name;
  std::ofstream(path) << content;
  return path;
}

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

TEST(LengthRange, ParsesAndRejects) {
  EXPECT_EQ(ParseLengthRange("32:512")->high, 512);
  EXPECT_EQ(ParseLengthRange("128")->low, 128);
  for (const char* bad : {"", "0", "5:4", "a", "1:", "1.5", "-1", "1:2:3", "nan"}) {
    EXPECT_FALSE(ParseLengthRange(bad).ok()) << bad;
  }
}

TEST(RecordedTrace, ReadsMooncakeAzureAndBurstGpt) {
  const auto mooncake =
      ReadTrace(WriteFile("m.jsonl",
                          "{\"timestamp\": 1000, \"input_length\": 7, \"output_length\": 3}\n"
                          "{\"timestamp\": 3500, \"input_length\": 8, \"output_length\": 4}\n"),
                0.5, 0);
  ASSERT_TRUE(mooncake.ok()) << mooncake.status();
  ASSERT_EQ(mooncake->size(), 2u);
  EXPECT_DOUBLE_EQ((*mooncake)[0].arrival, 0);
  EXPECT_DOUBLE_EQ((*mooncake)[1].arrival, 1.25);
  EXPECT_EQ((*mooncake)[1].output_tokens, 4);

  const auto azure = ReadTrace(WriteFile("a.csv",
                                         "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                                         "2023-11-16 18:17:03.9799600,4808,10\r\n"
                                         "2023-11-16 18:17:04.0319600,110,27\r\n"),
                               1, 0);
  ASSERT_TRUE(azure.ok()) << azure.status();
  EXPECT_EQ((*azure)[1].input_tokens, 110);
  EXPECT_NEAR((*azure)[1].arrival, 0.052, 1e-6);

  const auto burst =
      ReadTrace(WriteFile("b.csv",
                          "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
                          "45,ChatGPT,472,18,490,Conversation log\n"
                          "118,GPT-4,1087,0,1087,Conversation log\n"
                          "120,GPT-4,417,276,693,Conversation log\n"),
                1, 0);
  ASSERT_TRUE(burst.ok()) << burst.status();
  ASSERT_EQ(burst->size(), 2u) << "a request without an answer is not replayed";
  EXPECT_EQ((*burst)[1].output_tokens, 276);
}

TEST(RecordedTrace, ErrorsNameFileAndLine) {
  const auto missing = ReadTrace("/nonexistent/trace.csv", 1, 0);
  EXPECT_THAT(missing.status().ToString(), HasSubstr("/nonexistent/trace.csv"));
  const auto bad = ReadTrace(
      WriteFile("bad.jsonl", "{\"timestamp\": 1, \"input_length\": 7, \"output_length\": 3}\n{\n"),
      1, 0);
  EXPECT_THAT(bad.status().ToString(), HasSubstr("line 2"));
  const auto header = ReadTrace(WriteFile("bad.csv", "a,b,c\n1,2,3\n"), 1, 0);
  EXPECT_THAT(header.status().ToString(), HasSubstr("line 1"));
  const auto cell =
      ReadTrace(WriteFile("cell.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,2\n"), 1, 0);
  EXPECT_THAT(cell.status().ToString(), HasSubstr("line 2"));
}

}  // namespace
}  // namespace treadle
