// treadle-bench as those who work on Treadle meet it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/server/cli/child_process.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// Its output; it ends with `code`.
std::string Bench(std::vector<std::string> arguments, int code = 0) {
  arguments.insert(arguments.begin(), TREADLE_BENCH_BINARY);
  return RunToEnd(arguments, code);
}

TEST(TreadleBench, EveryBenchmarkHasHelp) {
  std::istringstream lines(Bench({"--help"}));
  int benchmarks = 0;
  for (std::string line, name; std::getline(lines, line);) {
    if (!line.starts_with("  ") || !(std::istringstream(line) >> name)) continue;
    ++benchmarks;
    EXPECT_THAT(Bench({name, "--help"}), HasSubstr(Str("Usage: treadle-bench ", name, " [flags]")));
  }
  EXPECT_EQ(benchmarks, 5);
}

TEST(TreadleBench, WrongUseSaysWhatIsWrong) {
  Bench({}, 2);
  EXPECT_THAT(Bench({"serve"}, 2), HasSubstr("'serve' is no benchmark"));
  EXPECT_THAT(Bench({"scheduler", "--running", "0"}, 2),
              testing::StartsWith("treadle-bench scheduler: --running"));
}

TEST(TreadleBench, SchedulerRuns) {
  const nlohmann::json report =
      nlohmann::json::parse(Bench({"scheduler", "--running", "1,3", "--waiting", "2",
                                   "--iterations", "20", "--repeats", "1", "--json"}));
  EXPECT_EQ(report["iterations"].size(), 2u) << report;
  EXPECT_TRUE(report["prefix_cache"]["microseconds_not_found"].is_number()) << report;
}

TEST(TreadleBench, LoadRuns) {
  const nlohmann::json report = nlohmann::json::parse(
      Bench({"load", "--rate", "200", "--streams", "20", "--seconds", "1", "--json"}));
  EXPECT_EQ(report["completed"], 200) << report;
  EXPECT_EQ(report["failed"], 0) << report;
  EXPECT_EQ(report["total_output_tokens"], 200 * 5) << report;
  EXPECT_TRUE(report["p99_client_lag_ms"].is_number()) << report;
}

}  // namespace
}  // namespace treadle
