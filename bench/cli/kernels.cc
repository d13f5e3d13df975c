// treadle-bench kernels and treadle-bench scheduler.
#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "base/status.h"
#include "bench/cli/benchmarks.h"
#include "bench/iteration/scheduler_bench.h"
#include "bench/kernels/kernel_bench.h"
#include "engine/choices.h"
#include "server/cli/bench/random_model_flag.h"
#include "server/cli/command.h"
#include "server/cli/progress.h"
#include "server/configuration.h"
#include "server/flag_values.h"

namespace treadle {

constexpr Choice<std::optional<CpuIsa>> kIsas[] = {{"best", std::nullopt},
                                                   {"avx2", CpuIsa::kAvx2},
                                                   {"avxvnni", CpuIsa::kAvxVnni},
                                                   {"avx512", CpuIsa::kAvx512},
                                                   {"avx512vbmi", CpuIsa::kAvx512Vbmi},
                                                   {"amx", CpuIsa::kAmx}};

int BenchKernels(int argc, char** argv) {
  KernelBenchOptions options;
  bool json = false;
  CLI::App app("Each op on real shapes: time, GB/s and GFLOP/s beside the device's ceilings.");
  app.add_option("--filter", options.filter, "only cases whose name contains this");
  AddChoice(app, "--device", options.device, kBenchDevices, "cpu, cuda or reference");
  app.add_flag("--deterministic", options.deterministic,
               "on a GPU: as serve's flag; the difference is what it costs");
  CLI::Option* const layer = AddRandomModelFlag(
      app, options.model, "instead of the op cases: a layer of a model in the shape of ");
  app.add_option("--formats", options.formats, "of its matrices, separated by commas")
      ->delimiter(',')
      ->needs(layer);
  app.add_option("--rows", options.rows, "of its products, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->needs(layer);
  app.add_option("--crossover-rows", options.crossover_rows,
                 "on a GPU: products of so many rows once more on the kernels for few rows (/few) "
                 "and on those for many (/many), to see where they cross")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20))
      ->needs(layer);
  app.add_option("--threads", options.threads, "compute threads; 0: one per CPU")
      ->check(CLI::Range(0, 4096));
  AddChoice(app, "--isa", options.isa, kIsas, "best, avx2, avx512, avx512vbmi or amx");
  AddChoice(app, "--compute", options.compute, kComputeModes,
            "auto, exact, int8, int12, int16, mixed or bf16");
  app.add_option("--seconds-per-case", options.seconds_per_case, "time spent on each case")
      ->check(CLI::Range(0.001, 60.0));
  app.add_option_function<std::string>(
         "--cold-memory",
         [&options](const std::string& text) {
           const auto bytes = ParseSize(text);
           if (!bytes.ok())
             throw CLI::ValidationError("--cold-memory", "'" + text + "' is no size");
           options.cold_bytes = *bytes;
         },
         "weights that a product takes from memory in turn: more than the caches hold")
      ->default_str("600M");
  app.add_flag("--json", json, "print JSON");
  if (auto code = ParseFlags(app, "treadle-bench kernels", argc, argv)) return *code;
  options.progress = ShowProgress("kernels");
  const absl::StatusOr<KernelBenchReport> report = RunKernelBench(options);
  if (!report.ok()) return Fail("treadle-bench kernels", report.status());
  return Finish("treadle-bench kernels", (json ? ToJson(*report) : ToTable(*report)) + "\n");
}

int BenchScheduler(int argc, char** argv) {
  SchedulerBenchOptions options;
  bool json = false;
  CLI::App app("Scheduling and bookkeeping per iteration, with an engine that does nothing.");
  app.add_option("--running", options.running, "running requests, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536));
  app.add_option("--waiting", options.waiting, "requests queued behind them")
      ->check(CLI::Range(0, 1'000'000));
  app.add_option("--iterations", options.iterations, "per repeat")
      ->check(CLI::Range(1, 100'000'000));
  app.add_option("--repeats", options.repeats, "the fastest counts")->check(CLI::Range(1, 1000));
  app.add_flag("--json", json, "print JSON");
  if (auto code = ParseFlags(app, "treadle-bench scheduler", argc, argv)) return *code;
  const auto rows = RunSchedulerBench(options);
  if (!rows.ok()) return Fail("treadle-bench scheduler", rows.status());
  return Finish("treadle-bench scheduler", (json ? ToJson(*rows) : ToTable(*rows)) + "\n");
}

}  // namespace treadle
