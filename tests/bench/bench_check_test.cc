// bench/check.py, with programs that say what a test wants instead of measuring.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/status.h"
#include "tests/server/cli/child_process.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class BenchCheck : public testing::Test {
 protected:
  // Both programs: a machine that reaches `peak`, and whose sequences get so many tokens per
  // second.
  void Machine(double peak, double tokens) {
    const std::string program = folder_.path() + "/program";
    std::ofstream(program) << Str(
        "#!/bin/sh\ncase $1 in\nkernels) echo '{\"backend\": \"cpu avx2, 1 thread\", \"peaks\": "
        "{\"float_gigaops_per_second\": ",
        peak, ", \"read_gigabytes_per_second\": ", peak,
        "}}';;\n"
        "scheduler) echo '{\"iterations\": [{\"microseconds_per_iteration\": ",
        1000 / peak, "}], \"prefix_cache\": {\"microseconds_found\": ", 1000 / peak,
        "}}';;\n"
        "bench) echo '{\"rows\": [{\"prefill_tokens_per_second\": ",
        tokens, ", \"decode_tokens_per_second\": ", tokens,
        "}, {\"decode_tokens_per_second\": ", tokens, "}]}';;\nesac\n");
    ASSERT_EQ(chmod(program.c_str(), 0755), 0);
  }
  std::string Check(int code, std::vector<std::string> more = {}) {
    std::vector<std::string> command = {"/usr/bin/env",
                                        "python3",
                                        TREADLE_SOURCE "/bench/check.py",
                                        "--rounds",
                                        "2",
                                        "--expected",
                                        folder_.path() + "/expected"};
    for (const char* flag : {"--treadle", "--treadle-bench"}) {
      command.insert(command.end(), {flag, folder_.path() + "/program"});
    }
    command.insert(command.end(), more.begin(), more.end());
    return RunToEnd(command, code);
  }
  TestFolder folder_;
};

TEST_F(BenchCheck, FailsWhereARatioFellByMoreThanFifteenPercent) {
  Machine(100, 1000);
  EXPECT_THAT(Check(1), HasSubstr("avx2.json is missing: nothing is committed for this"));
  EXPECT_THAT(Check(0, {"--write"}), HasSubstr("wrote"));
  EXPECT_THAT(Check(0), AllOf(HasSubstr("all within 15%"), Not(HasSubstr("SLOWER"))));
  Machine(50, 500);  // the whole machine is slower, nothing of ours
  EXPECT_THAT(Check(0), HasSubstr("all within 15%"));
  Machine(100, 860);
  EXPECT_THAT(Check(0), HasSubstr("-14.0%"));
  Machine(100, 840);
  EXPECT_THAT(Check(1), AllOf(HasSubstr("15 of 17 fell by more than 15%"),
                              HasSubstr("q4_0: new tokens/s, one sequence"), HasSubstr("-16.0%")));
}

// Something else takes time away from the first rounds; the third round is as it should be.
TEST_F(BenchCheck, WhatSeemsSlowerIsMeasuredAgain) {
  Machine(100, 1000);
  Check(0, {"--write"});
  Machine(100, 500);
  const std::string busy = folder_ / "busy", turns = folder_ / "turns";
  std::filesystem::rename(folder_ / "program", busy);
  Machine(100, 1000);
  std::filesystem::rename(folder_ / "program", folder_ / "quiet");
  std::ofstream(folder_ / "program")
      << Str("#!/bin/sh\n[ $1 != kernels ] || echo >>", turns, "\n[ $(wc -l <", turns,
             ") -lt 3 ] && exec ", busy, " \"$@\"\nexec ", folder_ / "quiet", " \"$@\"\n");
  ASSERT_EQ(chmod((folder_ / "program").c_str(), 0755), 0);
  EXPECT_THAT(Check(0), HasSubstr("all within 15%"));
}

TEST_F(BenchCheck, AProgramThatFailsIsNamed) {
  Machine(100, 1000);
  EXPECT_THAT(Check(1, {"--treadle", "/bin/false"}), HasSubstr("/bin/false bench iteration"));
}

}  // namespace
}  // namespace treadle
