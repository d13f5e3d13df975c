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
  for (const char* step :
       {"kernels_layer", "iteration_bf16", "iteration_int8", "iteration_nf4",
        "iteration_bf16-alone", "serve_fcfs", "serve_request-level", "kernels_ops"}) {
    EXPECT_THAT(report, HasSubstr(Str("| ", step, " | done |")));
  }
  for (const char* row :
       {"| qkv/bf16/rows=1 |", "| down/nf4/rows=8 |", "/one by one |", "| bf16 | 1.00 | 1.00 |",
        "| int8 | 1 | 16 |", "| nf4 | 2 | 40 |", "| bf16-alone | 2 | 16 |", "| fcfs | 50 |",
        "| request-level | 100 |", "| rms_norm/"}) {
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
                                     "serve_fcfs serve_request-level iteration_bf16-alone "
                                     "kernels_ops shapes")));
  const std::string report = Text("report.md");
  EXPECT_THAT(report, HasSubstr("| kernels_layer | done |"));
  EXPECT_THAT(report, HasSubstr("| iteration_nf4 | 3 |"));
  EXPECT_THAT(report, HasSubstr("| serve_fcfs | timeout |"));
  EXPECT_THAT(report, HasSubstr("| kernels_ops | skipped |"));
}

// What kernels for few rows and for many took becomes a table, by format, over a layer's products.
TEST_F(GpuRun, ReportsWhereKernelsCross) {
  std::string rows;
  const auto add = [&](const char* product, int count, const char* kind, double microseconds) {
    rows += Str(rows.empty() ? "" : ",", R"({"name": ")", product, "/nf4/rows=", count, "/", kind,
                R"(", "rows": )", count, R"(, "seconds": )", microseconds * 1e-6,
                R"(, "gigabytes_per_second": 1, "gigaops_per_second": 1, "bandwidth_share": 1,)",
                R"( "compute_share": 1})");
  };
  for (const char* product : {"up", "down"}) {
    add(product, 8, "few", 20);
    add(product, 8, "many", 30);
    add(product, 64, "few", 50);
    add(product, 64, "many", 35);
  }
  std::ofstream(folder_ / "bundle" / "treadle")
      << "#!/bin/sh\necho '{\"backend\": \"a GPU\", \"peaks\": {\"read_gigabytes_per_second\": 1, "
         "\"float_gigaops_per_second\": 1, \"integer_gigaops_per_second\": 1}, \"rows\": ["
      << rows << "]}'\n";
  fs::permissions(folder_ / "bundle" / "treadle", fs::perms::owner_all);
  EXPECT_EQ(Run({}, {"--only", "kernels_layer"}), 0) << said_;
  EXPECT_THAT(said_, HasSubstr("--crossover-rows 4,8,"));
  EXPECT_THAT(Text("report.md"), AllOf(HasSubstr("| nf4 | few | 40 | 100 |  |"),
                                       HasSubstr("| nf4 | many | 60 | 70 | from 64 rows on |")));
}

// A stand-in for the Python that has transformers.
TEST_F(GpuRun, SetsTransformersBesideTreadle) {
  const auto answers = [&](const fs::path& program, int prefill, int decode) {
    std::ofstream(program)
        << "#!/bin/sh\n"
           "case \"$*\" in *gpu_report*) PATH=${PATH#*:} exec python3 \"$@\" ;; esac\n"
           "echo '{\"mode\": \"eager\", \"backend\": \"peer\", \"weight_bytes\": 1, "
           "\"rows\": [{\"batch_size\": 1, \"prompt_tokens\": 16, "
           "\"decode_iteration_seconds\": 1, \"decode_gap_seconds\": 0, "
           "\"prefill_tokens_per_second\": "
        << prefill << ", \"decode_tokens_per_second\": " << decode << "}]}'\n";
    fs::permissions(program, fs::perms::owner_all);
  };
  answers(folder_ / "bundle" / "treadle", 300, 50);
  answers(folder_ / "python3", 100, 20);
  EXPECT_EQ(Run({Str("PATH=", folder_.string(), ":", std::getenv("PATH"))},
                {"--device", "cpu", "--quick", "--only", "iteration_bf16,transformers"}),
            0)
      << said_;
  EXPECT_THAT(Text("report.md"), HasSubstr("| peer, eager | 1 | 16 | 100 | 3.00 | 20 | 2.50 |"));
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
