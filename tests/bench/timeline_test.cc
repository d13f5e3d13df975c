// The timeline: its format, and that what it shows could have happened, recorded from the binary
// over ranks and over worker processes.
#include "bench/iteration/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/status.h"
#include "tests/server/cli/served_binary.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Json = nlohmann::json;
using Kind = TraceEvent::Kind;

TEST(Timeline, PlansAreAsynchronousAndTheRestIsComplete) {
  const std::vector<TraceEvent> events = {{.epoch = 2,
                                           .iteration = 5,
                                           .stage = 0,
                                           .rank = 0,
                                           .kind = Kind::kPlan,
                                           .begin = 1'000'000,
                                           .end = 1'002'500},
                                          {.epoch = 2,
                                           .iteration = 5,
                                           .stage = 0,
                                           .rank = 0,
                                           .kind = Kind::kForward,
                                           .begin = 1'002'500,
                                           .end = 1'004'500},
                                          {.epoch = 2,
                                           .iteration = 5,
                                           .stage = 1,
                                           .rank = 1,
                                           .kind = Kind::kSample,
                                           .begin = 1'005'000,
                                           .end = 1'005'500}};
  const Json trace = Json::parse(ToChromeTrace(events));
  std::vector<std::string> names;
  std::vector<std::string> shapes;
  for (const Json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") {
      names.push_back(event["args"]["name"]);
      continue;
    }
    EXPECT_EQ(event["args"]["iteration"], 5);
    EXPECT_EQ(event["args"]["epoch"], 2);
    shapes.push_back(Str(std::string(event["ph"]), " ", std::string(event["name"]), " ",
                         int{event["pid"]}, ".", int{event["tid"]}, " ", double{event["ts"]}, "+",
                         event.value("dur", 0.0)));
  }
  EXPECT_THAT(names, ElementsAre("stage 0", "rank 0", "rank 1"));
  EXPECT_THAT(shapes, ElementsAre("b plan 0.0 0+0", "e plan 0.0 2.5+0", "X forward 0.0 2.5+2",
                                  "X sample 1.1 5+0.5"));
  EXPECT_THAT(ToTable(events), HasSubstr("    0    0          1      0.00      0.00"));
}

// Spans that one rank recorded.
struct Row {
  std::vector<Json> complete;
  std::map<std::string, std::pair<double, double>> plans;  // by id: begin, end
};
using Rows = std::map<std::pair<int, int>, Row>;

Rows ReadRows(const Json& trace) {
  Rows rows;
  for (const Json& event : trace["traceEvents"]) {
    const std::string phase = event["ph"];
    if (phase == "M") continue;
    Row& row = rows[{event["pid"], event["tid"]}];
    if (phase == "X") {
      row.complete.push_back(event);
    } else {
      auto& plan = row.plans.try_emplace(event["id"], -1.0, -1.0).first->second;
      (phase == "b" ? plan.first : plan.second) = event["ts"];
    }
  }
  return rows;
}

double End(const Json& event) { return double{event["ts"]} + double{event["dur"]}; }

// Times were rounded to nanoseconds, and written in microseconds.
constexpr double kRounding = 0.002;

// A rank does one thing after the other, an iteration's phases in their order, and iterations in
// theirs, each after its plan.
void CheckRow(const Row& row, const std::vector<std::string>& phases) {
  ASSERT_FALSE(row.complete.empty());
  ASSERT_EQ(row.complete.size() % phases.size(), 0u);
  EXPECT_EQ(row.plans.size(), row.complete.size() / phases.size());
  for (const auto& [id, plan] : row.plans) EXPECT_LE(plan.first, plan.second) << id;
  for (size_t i = 0; i < row.complete.size(); ++i) {
    const Json& event = row.complete[i];
    EXPECT_EQ(event["name"], phases[i % phases.size()]);
    EXPECT_GE(double{event["dur"]}, 0);
    if (i == 0) continue;
    const Json& before = row.complete[i - 1];
    EXPECT_GE(double{event["ts"]} + kRounding, End(before));
    const int step = i % phases.size() == 0 ? 1 : 0;
    EXPECT_EQ(int{event["args"]["iteration"]}, int{before["args"]["iteration"]} + step);
  }
}

class TimelineBinary : public testing::Test {
 protected:
  Rows Record(const std::string& flags) {
    TinyModelOptions options;
    options.layers = 4;
    const std::string model = *WriteTinyLlamaGguf(folder_.path(), options);
    const std::string said = RunToEnd(Treadle(
        "bench trace --threads 2 --pin-threads off --prompt-tokens 20 --new-tokens 6 " + flags,
        {"--model", model, "--out", folder_ / "trace.json"}));
    EXPECT_THAT(said, HasSubstr("stage rank iterations"));
    return ReadRows(Json::parse(folder_.Read("trace.json")));
  }

 private:
  const TestFolder folder_;
};

TEST_F(TimelineBinary, RanksOfOneProcess) {
  const Rows rows = Record("--tensor-parallel 2");
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& [place, row] : rows) {
    EXPECT_EQ(place.first, 0);
    CheckRow(row, {"forward", "sample"});
  }
  EXPECT_EQ(rows.at({0, 0}).complete.size(), rows.at({0, 1}).complete.size());
}

TEST_F(TimelineBinary, StagesInWorkerProcesses) {
  const Rows rows = Record("--pipeline-parallel 2");
  ASSERT_EQ(rows.size(), 2u);
  const Row& first = rows.at({0, 0});
  const Row& last = rows.at({1, 0});
  CheckRow(first, {"forward", "send"});
  CheckRow(last, {"receive", "forward", "sample"});
  // A stage's input has been computed by the one before.
  std::map<int, double> computed;
  for (const Json& event : first.complete) {
    if (event["name"] == "forward") computed[event["args"]["iteration"]] = End(event);
  }
  EXPECT_EQ(computed.size(), last.complete.size() / 3);
  for (const Json& event : last.complete) {
    if (event["name"] != "forward") continue;
    EXPECT_GE(double{event["ts"]} + kRounding, computed.at(event["args"]["iteration"]));
  }
}

}  // namespace
}  // namespace treadle
