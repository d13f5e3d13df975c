// How `treadle top` looks: what it says, and that nothing leaves the terminal's width and height.
#include "server/cli/top/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

namespace treadle {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TopReport SomeReport() {
  TopReport report;
  report.target = "127.0.0.1:50051";
  report.interval = std::chrono::seconds(1);
  report.time = std::chrono::system_clock::from_time_t(1'000'000'000);  // 2001-09-09 01:46:40
  report.model = {.name = "tiny",
                  .architecture = "llama",
                  .backend = "cpu: avx2",
                  .version = "1.2.3",
                  .sha256 = "0123456789abcdef0123456789abcdef",
                  .parameters = 134'515'008,
                  .max_context = 2048};
  report.numbers = TopNumbers{.uptime = 93'784,
                              .running = 12,
                              .running_limit = 32,
                              .waiting = 3,
                              .waiting_limit = 1024,
                              .pages_used = 128,
                              .pages_total = 512,
                              .longest = {{7, 61, 512, 100, true}, {8, 0.5, 16, 3, false}},
                              .seconds = 1,
                              .iterations = 45,
                              .iterations_rate = 45,
                              .prompt_rate = 1234.4,
                              .decode_rate = 56.7,
                              .cached_rate = 890,
                              .finished_rate = 3.2,
                              .broken_rate = 0.1,
                              .mean_requests = 11.8,
                              .mean_tokens = 23.2,
                              .iteration = TopPercentiles{0.0201, 0.031},
                              .first_token = TopPercentiles{0.12, 1.4},
                              .shares = TopShares{0.9, 0.04, 0.01, 0.02, 0.03, 0.002}};
  return report;
}

TEST(TopView, TheScreenSaysWhatTheNumbersAre) {
  EXPECT_THAT(
      TopScreen(SomeReport(), 80, 24),
      ElementsAre("treadle top  127.0.0.1:50051  01:46:40 UTC  every 1.0 s",
                  "tiny (llama, 134.5 M parameters, context 2048)",
                  "treadle 1.2.3, sha256 0123456789ab, cpu: avx2", "up 1d02h", "",
                  "requests    running 12/32  waiting 3/1024",
                  "K/V cache   [#####...............]  25%  128/512 pages",
                  "ended       finished 3.2/s  cancelled, late or failed 0.1/s",
                  "tokens      prompt 1234/s  decode 56.7/s  from the prefix cache 890/s",
                  "iterations  45.0/s  p50 20.1 ms  p99 31.0 ms",
                  "batch       mean 11.8 requests, 23.2 tokens",
                  "time        compute 90%  sample 4%  receive 1%  bubble 2%  idle 3%; host 0.2%",
                  "queued      p50 -  p99 -", "first token p50 120.0 ms  p99 1.4 s",
                  "per token   p50 -  p99 -", "",
                  "   REQUEST      WAITS       RUNS     PROMPT    DECODED ",
                  "         7          -     >1m01s        512        100 ",
                  "         8          -   500.0 ms         16          3 "));
}

TEST(TopView, WhoOnlyHoldsPagesIsToldApart) {
  TopReport report = SomeReport();
  report.numbers->reserved = 2;
  EXPECT_THAT(TopScreen(report, 200, 24),
              Contains("requests    running 12/32  waiting 3/1024  holding pages 2"));
  EXPECT_EQ(nlohmann::json::parse(TopJson(report))["reserved"], 2);
}

TEST(TopView, WhatAnOperatorMustNotMissIsOnTheFourthLine) {
  TopReport report = SomeReport();
  report.numbers->draining = true;
  report.numbers->lost = 9;
  report.numbers->iterations = 0;
  report.numbers->since_iteration = 75;
  EXPECT_EQ(TopScreen(report, 200, 24)[3],
            "up 1d02h; draining: no new requests; no iteration for 1m15s; 9 ledger records missed");
  EXPECT_THAT(TopLine(report), testing::EndsWith("; " + TopScreen(report, 200, 24)[3]));
  report.numbers->running = 0;  // nothing to iterate for
  EXPECT_THAT(TopScreen(report, 200, 24)[3], Not(HasSubstr("no iteration")));
}

TEST(TopView, TroubleTakesTheNumbersPlace) {
  TopReport report = SomeReport();
  report.numbers.reset();
  report.trouble = absl::UnavailableError("connection refused");
  report.retry_in = std::chrono::milliseconds(1500);
  const std::string text = "no answer; next try in 1.5 s (UNAVAILABLE: connection refused)";
  EXPECT_THAT(TopScreen(report, 80, 24), testing::SizeIs(4));
  EXPECT_THAT(TopScreen(report, 80, 24), Contains(text));
  EXPECT_EQ(TopLine(report), "2001-09-09T01:46:40Z 127.0.0.1:50051: " + text);
  const auto json = nlohmann::json::parse(TopJson(report));
  EXPECT_EQ(json["error"], "UNAVAILABLE: connection refused");
  EXPECT_EQ(json["retry_in"], 1.5);
  EXPECT_FALSE(json.contains("running"));
}

TEST(TopView, BeforeTheFirstIntervalThereAreNoRates) {
  TopReport report = SomeReport();
  report.numbers->seconds = 0;
  EXPECT_THAT(TopScreen(report, 80, 24), Contains(HasSubstr("running 12/32")));
  EXPECT_THAT(TopScreen(report, 80, 24), Not(Contains(HasSubstr("/s"))));
  report.numbers.reset();
  EXPECT_THAT(TopScreen(report, 80, 24), Contains("connecting"));
}

// Whatever a server says, and however small the terminal is.
TEST(TopView, NothingLeavesTheScreen) {
  TopReport wild = SomeReport();
  constexpr int64_t kBig = std::numeric_limits<int64_t>::max();
  wild.target = std::string(300, 't') + "\x1b[2J";
  wild.model.name = "\x1b]0;title\x07 M\xc3\xbcnchen\n\r\t" + std::string(2000, 'n');
  wild.model.backend = std::string("a\0b", 3);
  *wild.numbers = {.uptime = 1e300,
                   .draining = true,
                   .running = kBig,
                   .running_limit = kBig,
                   .waiting = -kBig,
                   .waiting_limit = kBig,
                   .pages_used = kBig,
                   .pages_total = 1,
                   .longest = std::vector<TopRequest>(kTopRequests, {~0ull, 1e9, kBig, kBig, true}),
                   .seconds = 1e-300,
                   .lost = ~0ull,
                   .iterations_rate = std::numeric_limits<double>::infinity(),
                   .prompt_rate = 1e300,
                   .mean_tokens = std::numeric_limits<double>::quiet_NaN(),
                   .iteration = TopPercentiles{-1, 1e300},
                   .shares = TopShares{1e300, -1, 0, 0, 0, 0},
                   .history = std::vector<TopPast>(
                       kTopHistory, {std::numeric_limits<double>::infinity(), -kBig})};
  TopReport broken = wild;
  broken.trouble = absl::InternalError("\x1b[31mred\n" + std::string(3000, 'x'));
  const auto printable = [](const std::string& text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c <= 0x7e; });
  };
  for (const TopReport& report : {SomeReport(), wild, broken}) {
    for (int width = 0; width <= 130; width += width < 20 ? 1 : 10) {
      for (int height = 0; height <= 60; ++height) {
        const std::vector<std::string> lines = TopScreen(report, width, height);
        ASSERT_LE(lines.size(), static_cast<size_t>(height));
        for (const std::string& line : lines) {
          ASSERT_LE(line.size(), static_cast<size_t>(width));
          ASSERT_TRUE(printable(line)) << testing::PrintToString(line);
        }
      }
    }
    EXPECT_TRUE(printable(TopLine(report)));
    EXPECT_TRUE(nlohmann::json::accept(TopJson(report)));
    EXPECT_EQ(TopJson(report).find('\n'), std::string::npos);
  }
}

TEST(TopView, RequestsThatWaitFollowThoseThatRun) {
  TopReport report = SomeReport();
  report.numbers->longest_waiting = {{9, 2.5, 300, 0, false}, {10, 0.25, 16, 0, false}};
  const auto lines = TopScreen(report, 80, 24);
  ASSERT_EQ(lines.size(), 21u);
  EXPECT_EQ(lines[19], "         9      2.5 s          -        300          - ");
  EXPECT_EQ(lines[20], "        10   250.0 ms          -         16          - ");
  EXPECT_EQ(TopScreen(report, 80, 20).size(), 20u);
  EXPECT_EQ(nlohmann::json::parse(TopJson(report))["longest_waiting"][0]["request"], 9);
}

TEST(TopView, NamesOfKeysAreAColumnWhereThereAreSome) {
  TopReport report = SomeReport();
  report.numbers->longest_waiting = {{9, 2.5, 300, 0, true, "a\x1b[2Jlice"}};
  const auto lines = TopScreen(report, 80, 24);
  ASSERT_EQ(lines.size(), 20u);
  EXPECT_EQ(lines[16], "   REQUEST      WAITS       RUNS     PROMPT    DECODED  KEY");
  EXPECT_EQ(lines[17], "         7          -     >1m01s        512        100 ");
  EXPECT_EQ(lines[19], "         9     >2.5 s          -        300          -  a?[2Jlice");
  EXPECT_EQ(nlohmann::json::parse(TopJson(report))["longest_waiting"][0]["key"], "a\x1b[2Jlice");
}

TEST(TopView, HistoriesAreBarsUpToTheirHighest) {
  TopReport report = SomeReport();
  report.numbers->history = {{0, 0}, {10, 0}, {40, 2}, {80, 1}};
  const auto screen = [&](const TopStyle& style) { return TopScreen(report, 80, 24, style); };
  EXPECT_THAT(screen({}), Contains("tokens/s    __:#  most 80.0/s"));
  EXPECT_THAT(screen({}), Contains("waiting     __#:  most 2"));
  // U+2581, "lower one eighth block", to U+2588, "full block".
  EXPECT_THAT(screen({.blocks = true}), Contains("tokens/s    ▁▁▄█  most 80.0/s"));
  EXPECT_THAT(TopScreen(report, 35, 24), Contains("tokens/s    _:#  most 80.0/s"));
  report.numbers->history.resize(1);
  EXPECT_THAT(screen({}), Not(Contains(HasSubstr("most"))));
}

TEST(TopView, ColoursSayWhatIsFullAndWhatIsWrong) {
  TopReport report = SomeReport();
  const auto line = [&](size_t i) { return TopScreen(report, 80, 24, {.colours = true})[i]; };
  EXPECT_EQ(line(0).find("\x1b[1mtreadle top"), 0u);
  for (const auto& [pages, colour] : {std::pair(300, "32"), {400, "33"}, {500, "31"}}) {
    report.numbers->pages_used = pages;
    EXPECT_THAT(line(6), testing::StartsWith(std::string("\x1b[36mK/V cache   \x1b[0m\x1b[") +
                                             colour + "m["));
  }
  report.trouble = absl::UnavailableError("gone");
  EXPECT_THAT(line(3), testing::StartsWith("\x1b[31mno answer"));
}

TEST(TopView, TheLastLineHasTheKeysAndTheFirstTheWindow) {
  TopReport report = SomeReport();
  report.numbers->window = 60;
  const auto lines = TopScreen(report, 100, 30, {.keys = true, .paused = true});
  ASSERT_EQ(lines.size(), 30u);
  EXPECT_EQ(lines.back(), "q quit   p pause or go on   Ctrl-Z to the shell");
  EXPECT_THAT(lines[0], testing::EndsWith("every 1.0 s; p50, p99 of the last 1m00s"));
  EXPECT_THAT(lines[0], testing::StartsWith("treadle top (paused)  127.0.0.1:50051  "));
  EXPECT_EQ(nlohmann::json::parse(TopJson(report))["window"], 60);
}

TEST(TopView, TheListOfRequestsTakesWhatRoomThereIs) {
  TopReport report = SomeReport();
  report.numbers->longest.assign(kTopRequests, {1, 1, 1, 1, false});
  EXPECT_EQ(TopScreen(report, 80, 24).size(), 24u);
  EXPECT_EQ(TopScreen(report, 80, 30).size(), 30u);
  EXPECT_EQ(TopScreen(report, 80, 100).size(), 17u + kTopRequests);
  EXPECT_EQ(TopScreen(report, 80, 17).size(), 15u);  // a heading alone says nothing
}

TEST(TopView, ALineAndJsonHaveTheSameNumbers) {
  const TopReport report = SomeReport();
  EXPECT_EQ(TopLine(report),
            "2001-09-09T01:46:40Z running 12/32 waiting 3/1024 pages 128/512 finished 3.2/s broken "
            "0.1/s prompt 1234/s decode 56.7/s iterations 45.0/s p50 20.1 ms  p99 31.0 ms batch "
            "11.8 idle 3%; up 1d02h");
  const auto json = nlohmann::json::parse(TopJson(report));
  EXPECT_EQ(json["time"], 1e9);
  EXPECT_EQ(json["target"], "127.0.0.1:50051");
  EXPECT_EQ(json["model"], "tiny");
  EXPECT_EQ(json["sha256"], report.model.sha256);
  EXPECT_EQ(json["uptime"], 93'784);
  EXPECT_EQ(json["draining"], false);
  EXPECT_EQ(json["running"], 12);
  EXPECT_EQ(json["running_limit"], 32);
  EXPECT_EQ(json["waiting"], 3);
  EXPECT_EQ(json["waiting_limit"], 1024);
  EXPECT_EQ(json["kv_pages_used"], 128);
  EXPECT_EQ(json["kv_pages_total"], 512);
  EXPECT_EQ(json["interval"], 1);
  EXPECT_EQ(json["prompt_tokens_per_second"], 1234.4);
  EXPECT_EQ(json["decode_tokens_per_second"], 56.7);
  EXPECT_EQ(json["cached_tokens_per_second"], 890);
  EXPECT_EQ(json["iterations_per_second"], 45);
  EXPECT_EQ(json["iteration_seconds"]["p99"], 0.031);
  EXPECT_EQ(json["queued_seconds"], nullptr);
  EXPECT_EQ(json["first_token_seconds"]["p50"], 0.12);
  EXPECT_EQ(json["batch"]["mean_requests"], 11.8);
  EXPECT_NEAR(json["time_shares"]["idle"].get<double>(), 0.03, 1e-12);
  EXPECT_EQ(json["time_shares"]["bubble"], 0.02);
  ASSERT_EQ(json["longest"].size(), 2u);
  EXPECT_EQ(json["longest"][0]["request"], 7);
  EXPECT_EQ(json["longest"][0]["at_least"], true);
}

}  // namespace
}  // namespace treadle
