// Events as lines: text for people, and JSON that is JSON whatever is in it.
#include "server/observe/log_event.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "absl/time/clock.h"

namespace treadle {
namespace {

using nlohmann::json;

TEST(LogEvent, TextIsTheSentence) {
  EXPECT_EQ(ToText({.name = "drained", .message = "drained", .fields = {{"a", 1}}}), "drained\n");
  EXPECT_EQ(ToText({.message = "one\ntwo\x1b[2J\x7f äöü"}), "one\\x0atwo\\x1b[2J\\x7f äöü\n");
  EXPECT_EQ(ToText({.message = "finished",
                    .fields = {{"id", "a b"}, {"n", 3}, {"s", 0.5}, {"q", "x\"=\n"}, {"e", ""}},
                    .text = LogEvent::Text::kMessageAndFields}),
            "finished id=\"a b\" n=3 s=0.5 q=\"x\\\"=\\x0a\" e=\"\"\n");
  EXPECT_EQ(ToText({.message = "configuration",
                    .fields = {{"listen", "a:1"}, {"max-queue", "7"}},
                    .text = LogEvent::Text::kFieldLines}),
            "listen = a:1\nmax-queue = 7\n");
}

TEST(LogEvent, JsonHasTheAgreedKeys) {
  const LogEvent event{.severity = Severity::kWarning,
                       .name = "worker_lost",
                       .message = "worker 1 is gone",
                       .fields = {{"worker", 1}, {"share", 0.25}, {"how", "signal"}},
                       .time = absl::FromUnixMicros(1'500'000'000'000'007)};
  EXPECT_EQ(ToJson(event),
            R"({"time":"2017-07-14T02:40:00.000007Z","severity":"warning","event":"worker_lost",)"
            R"("message":"worker 1 is gone","worker":1,"share":0.25,"how":"signal"})"
            "\n");
}

bool SameFields(const std::vector<LogField>& a, const std::vector<LogField>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.key == y.key && x.value == y.value;
  });
}

TEST(LogEvent, WhateverTheBytesItIsOneLineOfJsonThatReadsBack) {
  std::mt19937 random(7);
  const auto text = [&](int low, int high) {
    std::string made(random() % 40, 0);
    for (char& c : made) c = static_cast<char>(low + static_cast<int>(random() % (high - low)));
    return made;
  };
  for (int round = 0; round < 3000; ++round) {
    const int high = round % 2 == 0 ? 128 : 256;  // only every other one is UTF-8 for sure
    LogEvent event{.severity = static_cast<Severity>(random() % 3),
                   .name = "some_event",
                   .message = text(0, high),
                   .fields = {{"text", text(0, high)},
                              {"number", static_cast<int64_t>(random()) - (1 << 30)},
                              {"ratio", static_cast<double>(random()) / 3}},
                   .time = absl::FromUnixMicros(static_cast<int64_t>(random()) * 1000 + 17)};
    const std::string line = ToJson(event);
    ASSERT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
    ASSERT_EQ(line.back(), '\n');
    ASSERT_TRUE(json::accept(line)) << line;
    const auto back = FromJson(line.substr(0, line.size() - 1));
    ASSERT_TRUE(back) << line;
    EXPECT_EQ(back->severity, event.severity);
    EXPECT_EQ(back->name, event.name);
    EXPECT_EQ(back->time, event.time);
    if (high == 128) {
      EXPECT_EQ(back->message, event.message);
      EXPECT_TRUE(SameFields(back->fields, event.fields)) << line;
    }
    const std::string plain = ToText(event);
    ASSERT_EQ(std::count(plain.begin(), plain.end(), '\n'), 1);
  }
}

TEST(LogEvent, OtherLinesAreNoEvents) {
  const std::string good = ToJson({.name = "a", .message = "b", .time = absl::Now()});
  ASSERT_TRUE(FromJson(good));
  const auto with = [&](const std::string& key, const json& value) {
    json changed = json::parse(good);
    value.is_null() ? changed.erase(key) : (changed[key] = value, 1);
    return changed.dump();
  };
  for (const std::string& bad :
       {std::string(), std::string("listening on a:1"), std::string("{}"), std::string("[1]"),
        std::string("7"), good.substr(0, good.size() / 2), with("time", "yesterday"),
        with("time", nullptr), with("severity", "fatal"), with("message", 7),
        with("event", nullptr)}) {
    EXPECT_FALSE(FromJson(bad)) << bad;
  }
}

}  // namespace
}  // namespace treadle
