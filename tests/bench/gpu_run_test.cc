// bench/gpu_run.sh, without a GPU: with the real program at small sizes, and with one that fails
// and hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/status.h"
#include "tests/server/child_process.h"

namespace treadle {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

constexpr char kBench[] = TREADLE_SOURCE "/bench";

class GpuRun : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "no python3";
    folder_ = fs::path(testing::TempDir()) / Str("treadle-gpu-run-", getpid());
    fs::create_directories(folder_ / "bundle");
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Text(const std::string& name) const {
    std::ifstream file(folder_ / "out" / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The script's exit code and what it said. `settings`: of its environment.
  int Run(std::vector<std::string> settings, const std::vector<std::string>& flags) {
    std::vector<std::string> command = {"/usr/bin/env",
                                        Str("BUNDLE=", (folder_ / "bundle").string())};
    command.insert(command.end(), settings.begin(), settings.end());
    command.insert(command.end(), {Str(kBench, "/gpu_run.sh"), folder_ / "out"});
    command.insert(command.end(), flags.begin(), flags.end());
    ChildProcess child(command);
    const int code = child.Wait();
    said_ = child.output();
    return code;
  }

  fs::path folder_;
  std::string said_;
};

TEST_F(GpuRun, EveryStepAtSmallSizesOnTheCpu) {
  fs::create_symlink(TREADLE_BINARY, folder_ / "bundle" / "treadle");
  ASSERT_EQ(Run({}, {"--device", "cpu", "--quick"}), 0) << said_;
  const std::string report = Text("report.md");
  for (const char* step : {"kernels_layer", "iteration_bf16", "iteration_int8", "iteration_nf4",
                           "serve_fcfs", "serve_request-level", "kernels_ops"}) {
    EXPECT_THAT(report, HasSubstr(Str("| ", step, " | done |")));
  }
  for (const char* row : {"| qkv/bf16/rows=1 |", "| down/nf4/rows=8 |", "/one by one |",
                          "| bf16 | 1.00 | 1.00 |", "| int8 | 1 | 16 |", "| nf4 | 2 | 40 |",
                          "| fcfs | 50 |", "| request-level | 100 |", "| rms_norm/"}) {
    EXPECT_THAT(report, HasSubstr(row)) << report;
  }
}

TEST_F(GpuRun, AStepThatFailsOrHangsDoesNotStopTheOthers) {
  std::ofstream(folder_ / "bundle" / "treadle") << "#!/bin/sh\n"
                                                   "case \"$2\" in\n"
                                                   "  iteration) echo 'no memory' >&2; exit 3 ;;\n"
                                                   "  serve) sleep 60 ;;\n"
                                                   "esac\n";
  fs::permissions(folder_ / "bundle" / "treadle", fs::perms::owner_all);
  EXPECT_EQ(Run({"BUDGET=9"}, {"--device", "cpu", "--quick"}), 1);
  EXPECT_THAT(said_, AllOf(HasSubstr("  | no memory"),
                           HasSubstr("failed: iteration_bf16 iteration_int8 iteration_nf4 "
                                     "serve_fcfs serve_request-level kernels_ops shapes")));
  const std::string report = Text("report.md");
  EXPECT_THAT(report, HasSubstr("| kernels_layer | done |"));
  EXPECT_THAT(report, HasSubstr("| iteration_nf4 | 3 |"));
  EXPECT_THAT(report, HasSubstr("| serve_fcfs | timeout |"));
  EXPECT_THAT(report, HasSubstr("| kernels_ops | skipped |"));
}

TEST_F(GpuRun, OnlyRunsWhatIsNamed) {
  std::ofstream(folder_ / "bundle" / "treadle") << "#!/bin/sh\n";
  fs::permissions(folder_ / "bundle" / "treadle", fs::perms::owner_all);
  EXPECT_EQ(Run({}, {"--only", "iteration_nf4,shapes"}), 0) << said_;
  EXPECT_THAT(said_, AllOf(HasSubstr("iteration_nf4 ("), Not(HasSubstr("iteration_int8 ("))));
}

TEST_F(GpuRun, WrongUseSaysWhatIsWrong) {
  EXPECT_EQ(Run({}, {}), 2);
  EXPECT_THAT(said_, HasSubstr("gpu_bundle.sh makes it"));
  EXPECT_EQ(Run({}, {"--fast"}), 2);
  EXPECT_THAT(said_, HasSubstr("unknown flag --fast"));
  ChildProcess bundle({Str(kBench, "/gpu_bundle.sh"), "hopper"});
  EXPECT_EQ(bundle.Wait(), 2);
  EXPECT_THAT(bundle.output(), HasSubstr("architecture is 'hopper', expected one such as sm_90a"));
}

}  // namespace
}  // namespace treadle
