// bench/gpu_run.sh, without a GPU: with the real program at small sizes, and with one that fails
// and hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/server/cli/child_process.h"
#include "tests/support/test_folder.h"

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
    fs::create_directories(folder_ / "bundle");
    fs::create_symlink("treadle", folder_ / "bundle" / "treadle-bench");
  }
  // The bundle's file in the program's place.
  void Program(const std::string& text) const {
    own_.Write("bundle/treadle", text);
    fs::permissions(folder_ / "bundle" / "treadle", fs::perms::owner_all);
  }

  std::string Text(const std::string& name) const { return own_.Read("out/" + name); }
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

  // A row of `treadle-bench kernels`. more: further members.
  static std::string KernelRow(const std::string& name, int rows, double microseconds,
                               const std::string& more = "") {
    return Str(R"({"name": ")", name, R"(", "rows": )", rows, R"(, "seconds": )",
               microseconds * 1e-6, more,
               R"(, "gigabytes_per_second": 1, "gigaops_per_second": 1, "bandwidth_share": 1,)",
               R"( "compute_share": 1})");
  }
  // The report of a run whose kernels took so long. more: further members of the benchmark's JSON.
  std::string ReportOfKernels(const std::vector<std::string>& rows, const std::string& more = "") {
    std::string all;
    for (const std::string& row : rows) all += (all.empty() ? "" : ",") + row;
    Program(
        Str("#!/bin/sh\necho '{\"backend\": \"a GPU\", \"peaks\": "
            "{\"read_gigabytes_per_second\": 1, \"float_gigaops_per_second\": 1, "
            "\"integer_gigaops_per_second\": 1}, \"rows\": [",
            all, "]", more, "}'\n"));
    EXPECT_EQ(Run({}, {"--only", "kernels_layer"}), 0) << said_;
    return Text("report.md");
  }

  const TestFolder own_;
  const fs::path folder_ = own_.path();
  std::string said_;
};

TEST_F(GpuRun, EveryStepAtSmallSizesOnTheCpu) {
  fs::create_symlink(fs::absolute(TREADLE_BINARY), folder_ / "bundle" / "treadle");
  fs::remove(folder_ / "bundle" / "treadle-bench");
  fs::create_symlink(fs::absolute(TREADLE_BENCH_BINARY), folder_ / "bundle" / "treadle-bench");
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
  Program(
      "#!/bin/sh\n"
      "case \"$2\" in\n"
      "  iteration) echo 'no memory' >&2; exit 3 ;;\n"
      "  serve) sleep 60 ;;\n"
      "esac\n");
  EXPECT_EQ(Run({"STEP_LIMIT=2"}, {"--device", "cpu", "--quick"}), 1);
  EXPECT_THAT(said_, AllOf(HasSubstr("  | no memory"),
                           HasSubstr("failed: iteration_bf16 iteration_bf16-alone iteration_int8 "
                                     "iteration_nf4 serve_fcfs serve_request-level")));
  const std::string report = Text("report.md");
  EXPECT_THAT(report, HasSubstr("| kernels_layer | done |"));
  EXPECT_THAT(report, HasSubstr("| iteration_nf4 | 3 |"));
  EXPECT_THAT(report, HasSubstr("| serve_fcfs | timeout |"));
  EXPECT_THAT(report, HasSubstr("| kernels_ops | done |"));
}

// Steps that do not fit into a call's time are the next call's, and none runs twice.
TEST_F(GpuRun, CallsGoOnWhereTheLastOneEnded) {
  Program(Str("#!/bin/sh\necho \"$*\" >>", own_ / "log", "\nsleep 1\n"));
  int calls = 1;
  while (Run({"BUDGET=5", "STEP_LIMIT=3"}, {"--device", "cpu", "--quick"}) == 3 && calls < 20) {
    EXPECT_THAT(said_, HasSubstr("\nleft: "));
    ++calls;
  }
  EXPECT_THAT(said_, Not(HasSubstr("left: ")));
  EXPECT_GT(calls, 2);
  EXPECT_LT(calls, 20);
  std::ifstream log(folder_ / "log");
  std::vector<std::string> runs;
  for (std::string line; std::getline(log, line);) runs.push_back(line);
  EXPECT_EQ(runs.size(), 10u);
  std::sort(runs.begin(), runs.end());
  EXPECT_EQ(std::unique(runs.begin(), runs.end()), runs.end());
}

// The most important step comes first, and every call is shorter than nine minutes.
TEST_F(GpuRun, DryRunListsCallsThatAreShortEnough) {
  Program("#!/bin/sh\nexit 9\n");
  ASSERT_EQ(Run({}, {"--dry-run"}), 0) << said_;
  std::istringstream lines(said_);
  std::string all;
  int expected = 1;
  for (std::string line; std::getline(lines, line); ++expected) {
    int number = 0, seconds = 0, at = 0;
    ASSERT_EQ(std::sscanf(line.c_str(), "call %d, at most %d s: --only %n", &number, &seconds, &at),
              2)
        << line;
    EXPECT_EQ(number, expected);
    EXPECT_LT(seconds, 540);
    all += line.substr(static_cast<size_t>(at)) + ",";
  }
  EXPECT_THAT(all, testing::StartsWith("cuda_device_test,ops_first,cuda_backend_test,memcheck,"
                                       "racecheck,synccheck,greedy_cpu,greedy_cuda,greedy_bf16,"
                                       "prefix_cache,shapes,kernels_layer,iteration_bf16,"));
  for (const char* step : {"iteration_bf16-late-launches,", "ncu,", "iteration_nf4,", "serve_fcfs,",
                           "transformers,", "nccl_gpu_test,"}) {
    EXPECT_THAT(all, HasSubstr(step));
  }
}

// Python and NVIDIA's tools keep their own libraries.
TEST_F(GpuRun, OnlyTheBundlesProgramsGetItsLibraries) {
  const auto tell = [&](const fs::path& program, const std::string& then) {
    std::ofstream(program) << "#!/bin/sh\necho \"$(basename $0) [$LD_LIBRARY_PATH]\" >>"
                           << (folder_ / "log").string() << "\n"
                           << then;
    fs::permissions(program, fs::perms::owner_all);
  };
  fs::create_directories(folder_ / "tools");
  tell(folder_ / "tools" / "python3", "PATH=${PATH#*:} exec python3 \"$@\"\n");
  tell(folder_ / "tools" / "compute-sanitizer",
       "while [ \"$1\" != env ]; do shift; done; exec \"$@\"\n");
  tell(folder_ / "bundle" / "treadle", "");
  tell(folder_ / "bundle" / "cuda_backend_test", "");
  EXPECT_EQ(Run({Str("PATH=", (folder_ / "tools").string(), ":", std::getenv("PATH")),
                 "LD_LIBRARY_PATH="},
                {"--only", "memcheck,shapes"}),
            0)
      << said_;
  const std::string said = own_.Read("log");
  const std::string libraries = (folder_ / "bundle" / "lib").string();
  EXPECT_THAT(said, AllOf(HasSubstr("compute-sanitizer []"), HasSubstr("python3 []"),
                          HasSubstr(Str("cuda_backend_test [", libraries)),
                          HasSubstr(Str("treadle [", libraries))));
  EXPECT_THAT(said, Not(HasSubstr(Str("python3 [", libraries))));
}

// A bundle of the program that is here: all that it needs but the C library. (The script fails
// where its archive is too large.)
TEST_F(GpuRun, ABundleHasTheLibrariesThatItsProgramsNeed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "programs with sanitizers are not bundled";
#endif
  const fs::path bundle = folder_ / "made";
  ChildProcess child({"/usr/bin/env", "BUILT=yes", "TARGETS=treadle treadle-bench",
                      "TREADLE_MODEL=/nowhere",
                      Str("BUILD=", fs::path(TREADLE_BINARY).parent_path().string()),
                      Str("OUT=", bundle.string()), Str(kBench, "/gpu_bundle.sh")});
  ASSERT_EQ(child.Wait(), 0) << child.output();
  EXPECT_TRUE(fs::exists(bundle / "gpu_run.sh"));
  std::set<std::string> libraries;
  for (const auto& file : fs::directory_iterator(bundle / "lib")) {
    libraries.insert(file.path().filename().string());
  }
  ChildProcess needs({"/bin/sh", "-c", Str("ldd ", (bundle / "treadle").string())});
  ASSERT_EQ(needs.Wait(), 0);
  std::istringstream lines(needs.output());
  int there = 0;
  for (std::string line; std::getline(lines, line);) {
    const std::string path = line.substr(line.find_first_not_of(" \t"));
    const std::string name = fs::path(path.substr(0, path.find(' '))).filename().string();
    const bool of_the_c_library = std::regex_search(
        name, std::regex("^(ld-linux|linux-vdso|lib(c|m|dl|rt|pthread|resolv|util)\\.)"));
    EXPECT_EQ(libraries.contains(name), !of_the_c_library) << name;
    there += of_the_c_library ? 0 : 1;
  }
  EXPECT_GT(there, 0);
  for (const std::string& name : libraries) {
    EXPECT_FALSE(std::regex_search(name, std::regex("^lib(cuda|cublas|nccl|nvidia)"))) << name;
  }
}

// Times of kernels for few rows and for many become a table, by format, over a layer's products.
TEST_F(GpuRun, ReportsWhereKernelsCross) {
  std::vector<std::string> rows;
  for (const std::string product : {"up", "down"}) {
    rows.push_back(KernelRow(product + "/nf4/rows=8/few", 8, 20));
    rows.push_back(KernelRow(product + "/nf4/rows=8/many", 8, 30));
    rows.push_back(KernelRow(product + "/nf4/rows=64/few", 64, 50));
    rows.push_back(KernelRow(product + "/nf4/rows=64/many", 64, 35));
  }
  EXPECT_THAT(ReportOfKernels(rows),
              AllOf(HasSubstr("| nf4 | few | 40 | 100 |  |"),
                    HasSubstr("| nf4 | many | 60 | 70 | from 64 rows on |")));
  EXPECT_THAT(said_, HasSubstr("--crossover-rows 4,8,"));
}

// LLM.int8() beside cuBLASLt's product: by case, and for all that were measured at so many rows.
TEST_F(GpuRun, ReportsInt8BesideTheLibrary) {
  const auto beside = [](double microseconds) {
    return Str(R"(, "library_seconds": )", microseconds * 1e-6);
  };
  const std::string alone = KernelRow("down/int8/rows=64", 64, 30);
  EXPECT_THAT(ReportOfKernels({KernelRow("up/bf16/rows=32", 32, 70),
                               KernelRow("up/int8/rows=32", 32, 40, beside(50)),
                               KernelRow("down/int8/rows=32", 32, 20, beside(10)),
                               KernelRow("up/int8/rows=64", 64, 80, beside(60)), alone},
                              R"(, "notes": ["down/int8/rows=64: no algorithm"])"),
              AllOf(HasSubstr("## LLM.int8() and cuBLASLt"),
                    HasSubstr("| up/int8/rows=32 | 40.0 | 50.0 | 1.25 |"),
                    HasSubstr("| down/int8/rows=32 | 20.0 | 10.0 | 0.50 |"),
                    HasSubstr("| all of these, 32 rows | 60.0 | 60.0 | 1.00 |"),
                    HasSubstr("| all of these, 64 rows | 80.0 | 60.0 | 0.75 |"),
                    HasSubstr("\ndown/int8/rows=64: no algorithm\n")));
  EXPECT_THAT(ReportOfKernels({alone}, R"(, "notes": ["no memory"])"),
              AllOf(HasSubstr("\nno memory\n"), Not(HasSubstr("time / ours"))));
  EXPECT_THAT(ReportOfKernels({alone}), Not(HasSubstr("cuBLASLt")));
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
  Program("#!/bin/sh\n");
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
