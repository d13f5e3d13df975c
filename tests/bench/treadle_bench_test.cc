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

struct Result {
  int code;
  std::string output;  // both streams
};
Result Bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), TREADLE_BENCH_BINARY);
  ChildProcess child(arguments);
  const int code = child.Wait();
  return {code, child.output()};
}

TEST(TreadleBench, EveryBenchmarkHasHelp) {
  const Result all = Bench({"--help"});
  EXPECT_EQ(all.code, 0);
  std::istringstream lines(all.output);
  int benchmarks = 0;
  for (std::string line, name; std::getline(lines, line);) {
    if (!line.starts_with("  ") || !(std::istringstream(line) >> name)) continue;
    ++benchmarks;
    const Result help = Bench({name, "--help"});
    EXPECT_EQ(help.code, 0) << help.output;
    EXPECT_THAT(help.output, HasSubstr(Str("Usage: treadle-bench ", name, " [OPTIONS]")));
  }
  EXPECT_EQ(benchmarks, 4);
}

TEST(TreadleBench, WrongUseSaysWhatIsWrong) {
  EXPECT_EQ(Bench({}).code, 2);
  const Result unknown = Bench({"serve"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_THAT(unknown.output, HasSubstr("'serve' is no benchmark"));
  const Result flag = Bench({"scheduler", "--running", "0"});
  EXPECT_EQ(flag.code, 2);
  EXPECT_THAT(flag.output, testing::StartsWith("treadle-bench scheduler: --running"));
}

TEST(TreadleBench, SchedulerRuns) {
  const Result result = Bench({"scheduler", "--running", "1,3", "--waiting", "2", "--iterations",
                               "20", "--repeats", "1", "--json"});
  ASSERT_EQ(result.code, 0) << result.output;
  const nlohmann::json report = nlohmann::json::parse(result.output);
  EXPECT_EQ(report["iterations"].size(), 2u) << result.output;
  EXPECT_TRUE(report["prefix_cache"]["microseconds_not_found"].is_number()) << result.output;
}

}  // namespace
}  // namespace treadle
