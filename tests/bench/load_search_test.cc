// Reports of a load run beyond the first: the search for a rate, guesses of tokens, the HTML page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "bench/load/load_html.h"
#include "bench/load/rate_search.h"
#include "bench/load/spec_decode.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;
using testing::Eq;
using testing::HasSubstr;
using testing::Not;

TEST(FindHighestRate, IsWithinFivePercentFromEitherSide) {
  for (const double limit : {0.013, 0.9, 1.0, 3.7, 1000.0}) {
    std::vector<double> tried;
    const auto found = FindHighestRate(1, [&](double rate) -> absl::StatusOr<bool> {
      tried.push_back(rate);
      return rate <= limit;
    });
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_LE(*found, limit);
    EXPECT_GE(*found * 1.05, limit);
    EXPECT_LE(tried.size(), 20u);
    EXPECT_THAT(tried, testing::Contains(Eq(*found)));
  }
}

TEST(FindHighestRate, EndsWhereThereIsNone) {
  int tries = 0;
  const auto says = [&](bool answer) {
    return [&tries, answer](double) -> absl::StatusOr<bool> { return ++tries, answer; };
  };
  EXPECT_THAT(FindHighestRate(2, says(true)).status().ToString(),
              HasSubstr("every rate up to 8192 requests/s is within --goodput"));
  EXPECT_THAT(FindHighestRate(2, says(false)).status().ToString(), HasSubstr("no rate down to"));
  EXPECT_EQ(tries, 26);
  EXPECT_THAT(
      FindHighestRate(2, [](double) { return absl::UnavailableError("gone"); }).status().ToString(),
      HasSubstr("gone"));
}

// vLLM's counters as its server prints them, and the keys and values that its client makes of them.
TEST(SpecDecode, HasVllmsKeys) {
  const auto metrics = [](int drafts, int tokens, int accepted, int first, int second) {
    return Str("# HELP vllm:spec_decode_num_drafts_total x\n",
               "vllm:spec_decode_num_drafts_total{engine=\"0\"} ", drafts, ".0\n",
               "vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} ", tokens, ".0\n",
               "vllm:spec_decode_num_accepted_tokens_total{engine=\"0\"} ", accepted, ".0\n",
               "vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} ",
               first, ".0\n",
               "vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"1\"} ",
               second, ".0\n", "treadle:spec_decode_num_draft_tokens_total 7\n");
  };
  const auto before = ReadSpecDecode(metrics(10, 20, 5, 4, 1));
  const auto after = ReadSpecDecode(metrics(20, 40, 17, 13, 4));
  ASSERT_TRUE(before && after);
  Json report;
  AddSpecDecode(*before, *after, report);
  EXPECT_EQ(report, Json::parse(R"({"spec_decode_acceptance_rate": 60.0,
      "spec_decode_acceptance_length": 2.2, "spec_decode_num_drafts": 10,
      "spec_decode_draft_tokens": 20, "spec_decode_accepted_tokens": 12,
      "spec_decode_per_position_acceptance_rates": [0.9, 0.3]})"));
  Json nothing = Json::object();
  AddSpecDecode(*after, *after, nothing);
  EXPECT_EQ(nothing, Json::object());
}

TEST(SpecDecode, OwnNamesDoAndNoneIsNothing) {
  const auto before = ReadSpecDecode(
      "treadle:spec_decode_num_draft_tokens_total 0\n"
      "treadle:spec_decode_num_accepted_tokens_total 0\n");
  const auto after = ReadSpecDecode(
      "treadle:spec_decode_num_draft_tokens_total 8\n"
      "treadle:spec_decode_num_accepted_tokens_total 6\n");
  ASSERT_TRUE(before && after);
  Json report;
  AddSpecDecode(*before, *after, report);
  EXPECT_EQ(report["spec_decode_acceptance_rate"], 75.0);
  EXPECT_FALSE(report.contains("spec_decode_num_drafts"));
  EXPECT_FALSE(ReadSpecDecode("vllm:num_requests_running 3\n"));
}

TEST(LoadHtml, IsWholeInItselfAndShowsEveryRun) {
  LoadResult result;
  result.duration = 3;
  result.requests = {{0.5, 10, 3, {1.0, 1.2, 1.6}, 1.6, ""}, {1, 20, 2, {2, 2.5}, 2.5, ""}};
  const LoadReport report = Analyze(result, {});
  const Json said = ToJson(report, result, false, {}, {{"label", "<script>alert(1)</script>"}});
  const std::string html =
      ToHtml({{"1 requests/s", said, &report, &result}, {"a \"b\" & c", said, &report, &result}},
             "the highest rate is < 3");
  // Nothing runs, and nothing is fetched.
  for (const char* none :
       {"<script", "http:", "https:", "src=", "href=", "url(", "@import", "nan"}) {
    EXPECT_THAT(html, Not(HasSubstr(none)));
  }
  for (const char* said_there :
       {"&lt;script&gt;alert(1)", "a &quot;b&quot; &amp; c", "the highest rate is &lt; 3",
        "median_ttft_ms", ">Time to first token<", ">Time between tokens<", ">Output tokens<",
        ">Requests under way<", ">Median time to first token by throughput<", "tokens/s"}) {
    EXPECT_THAT(html, HasSubstr(said_there));
  }
  const auto count = [&](const std::string& what) {
    int found = 0;
    for (size_t at = html.find(what); at != html.npos; at = html.find(what, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("<svg"), count("</svg>"));
  EXPECT_EQ(count("<svg"), 7) << "two by throughput, three distributions, two over time";
  EXPECT_EQ(count("class=\"curve\""), 2 + 5 * 2);
  EXPECT_THAT(ToHtml({{"x", said, &report, &result}}, ""), Not(HasSubstr("by throughput")));
}

}  // namespace
}  // namespace treadle
