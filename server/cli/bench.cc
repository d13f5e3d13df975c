// treadle bench: one row of the table each; here bench serve and bench iteration.
#include "server/cli/bench.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string_view>

#include "bench/iteration_bench.h"
#include "bench/load_client.h"
#include "bench/load_report.h"
#include "bench/trace.h"
#include "kernels/status.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

// Every benchmark: parse, run, print; a bad flag or file is one line and exit code 2.
int Finish(const char* command, const absl::StatusOr<std::string>& output) {
  if (!output.ok()) return Fail(command, output.status());
  std::fputs(output->c_str(), stdout);
  if (!output->empty() && output->back() != '\n') std::fputc('\n', stdout);
  return 0;
}

// -- bench serve
// ------------------------------------------------------------------------------------

struct ServeBenchOptions {
  LoadClientOptions load;
  ClientFlags access;
  SyntheticTrace trace;
  std::string rate = "1";
  std::string input = "32:512";
  std::string output = "1:128";
  std::string trace_file;
  double time_scale = 1;
  int64_t warmups = 0;
  int64_t wait_ready = 0;
  std::string percentiles = "90,99";
  std::vector<std::string> goodput;
  std::string label;
  std::string save_result;
  bool stop_at_eos = false;
  bool json = false;
};

absl::StatusOr<std::vector<TraceEntry>> TraceOf(ServeBenchOptions& options) {
  if (!options.trace_file.empty()) {
    return ReadTrace(options.trace_file, options.time_scale, options.trace.num_requests);
  }
  TREADLE_ASSIGN_OR_RETURN(options.trace.input, ParseLengthRange(options.input));
  TREADLE_ASSIGN_OR_RETURN(options.trace.output, ParseLengthRange(options.output));
  options.trace.request_rate = 0;  // all at once
  if (options.rate != "inf") {
    char* end = nullptr;
    options.trace.request_rate = std::strtod(options.rate.c_str(), &end);
    if (*end != '\0' || !std::isfinite(options.trace.request_rate) ||
        options.trace.request_rate <= 0) {
      return InvalidArgument("--request-rate is '", options.rate,
                             "', expected requests per second above 0, or inf");
    }
  }
  return MakeTrace(options.trace);
}

absl::StatusOr<std::map<std::string, double>> ParseGoodput(const std::vector<std::string>& bounds) {
  std::map<std::string, double> result;
  for (const std::string& bound : bounds) {
    const size_t colon = bound.find(':');
    const std::string name = bound.substr(0, colon);
    char* end = nullptr;
    const double ms = colon == std::string::npos ? 0 : std::strtod(bound.c_str() + colon + 1, &end);
    const bool known = name == "ttft" || name == "tpot" || name == "itl" || name == "e2el";
    if (!known || end == nullptr || *end != '\0' || !(ms > 0)) {
      return InvalidArgument("--goodput ", bound, ": expected ttft:MS, tpot:MS, itl:MS or e2el:MS");
    }
    result[name] = ms;
  }
  return result;
}

absl::StatusOr<std::vector<double>> ParseNumbers(const char* flag, const std::string& text,
                                                 double low, double high) {
  std::vector<double> numbers;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) {
    char* end = nullptr;
    const double number = std::strtod(part.c_str(), &end);
    if (part.empty() || *end != '\0' || !(number >= low && number <= high)) {
      return InvalidArgument(flag, " has '", part, "', expected numbers from ", low, " to ", high,
                             " separated by commas");
    }
    numbers.push_back(number);
  }
  if (numbers.empty()) return InvalidArgument(flag, " is empty");
  return numbers;
}

absl::StatusOr<std::string> RunLoad(ServeBenchOptions options) {
  TREADLE_ASSIGN_OR_RETURN(const auto percentiles,
                           ParseNumbers("--metric-percentiles", options.percentiles, 0, 100));
  TREADLE_ASSIGN_OR_RETURN(const auto goodput, ParseGoodput(options.goodput));
  TREADLE_ASSIGN_OR_RETURN(const std::vector<TraceEntry> trace, TraceOf(options));
  TREADLE_ASSIGN_OR_RETURN(ClientAccess access, OpenAccess(options.access));
  options.load.credentials = std::move(access.credentials);
  options.load.authorization = std::move(access.authorization);
  if (options.wait_ready > 0) {
    TREADLE_RETURN_IF_ERROR(WaitReady(options.load, std::chrono::seconds(options.wait_ready)));
  }
  options.load.ignore_eos = !options.stop_at_eos;
  if (options.warmups > 0) {
    std::vector<TraceEntry> warmup(static_cast<size_t>(options.warmups), TraceEntry{0, 32, 8});
    TREADLE_RETURN_IF_ERROR(Replay(warmup, options.load).status());
  }
  absl::StatusOr<LoadResult> result;
  {
    Progress progress("requests");
    options.load.progress = [&](int64_t done, int64_t total) {
      progress.Set(static_cast<double>(done) / static_cast<double>(total));
    };
    result = Replay(trace, options.load);
  }
  TREADLE_RETURN_IF_ERROR(result.status());
  const LoadReport report = Analyze(*result, goodput);
  std::map<std::string, std::string> about = {{"target", options.load.target},
                                              {"request_rate", options.rate}};
  if (!options.label.empty()) about["label"] = options.label;
  if (!options.trace_file.empty()) about["trace"] = options.trace_file;
  if (!options.save_result.empty()) {
    std::ofstream file(options.save_result);
    file << ToJson(report, *result, /*details=*/true, percentiles, about) << "\n";
    if (!file.flush()) return InvalidArgument("--save-result: cannot write ", options.save_result);
  }
  if (options.json) return ToJson(report, *result, /*details=*/false, percentiles, about);
  return ToTable(report, percentiles);
}

int BenchServe(int argc, char** argv) {
  ServeBenchOptions options;
  options.load.target = "127.0.0.1:50051";
  CLI::App app(
      "Replays a trace of requests against a server. Latency counts from the scheduled "
      "arrival.");
  app.add_option("--target", options.load.target, "gRPC address of the server");
  AddClientFlags(app, options.access);
  app.add_option("--num-prompts", options.trace.num_requests, "requests")
      ->check(CLI::Range(int64_t{1}, int64_t{10'000'000}));
  app.add_option("--request-rate", options.rate, "requests per second; inf: all at once");
  app.add_option("--burstiness", options.trace.burstiness,
                 "shape of gamma-distributed gaps; 1: Poisson")
      ->check(CLI::Range(0.01, 1000.0));
  app.add_option("--input-len", options.input, "prompt tokens: N, or LOW:HIGH (uniform)");
  app.add_option("--output-len", options.output, "generated tokens: N, or LOW:HIGH (uniform)");
  app.add_option("--trace", options.trace_file,
                 "recorded trace instead (Mooncake JSONL, Azure or BurstGPT CSV)");
  app.add_option("--time-scale", options.time_scale, "multiplies a recorded trace's arrival times")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--max-concurrency", options.load.max_concurrency,
                 "requests under way at once; 0: no limit")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--num-warmups", options.warmups, "short requests before the run")
      ->check(CLI::Range(0, 1000));
  app.add_option("--seed", options.load.seed, "of arrivals, lengths and prompts");
  app.add_option("--temperature", options.load.temperature, "of sampling; 0: greedy")
      ->check(CLI::Range(0.0f, 100.0f));
  app.add_flag(
      "--ignore-eos,!--stop-at-eos", [&](int64_t count) { options.stop_at_eos = count < 0; },
      "every answer has its full length (the default), or ends as the model wants");
  app.add_option("--goodput", options.goodput,
                 "count requests within bounds in ms: ttft:MS tpot:MS itl:MS e2el:MS");
  app.add_option("--metric-percentiles", options.percentiles, "for the report");
  app.add_option("--wait-ready", options.wait_ready, "wait this many seconds for the server")
      ->check(CLI::Range(0, 3600));
  app.add_option("--label", options.label, "name of this run in the JSON (curve of a plot)");
  app.add_option("--save-result", options.save_result,
                 "file for the full JSON, per-request lists too");
  app.add_flag("--json", options.json, "print the summary as one JSON line");
  if (auto code = ParseFlags(app, "bench serve", argc, argv)) return *code;
  options.trace.seed = options.load.seed;
  return Finish("bench serve", RunLoad(options));
}

// -- bench iteration
// --------------------------------------------------------------------------------

absl::StatusOr<std::string> RunIteration(ServeOptions serve, IterationBenchOptions options,
                                         const std::string& batch_sizes, bool json) {
  TREADLE_ASSIGN_OR_RETURN(const auto sizes, ParseNumbers("--batch-sizes", batch_sizes, 1, 65536));
  options.batch_sizes.assign(sizes.begin(), sizes.end());
  const int32_t largest = *std::max_element(options.batch_sizes.begin(), options.batch_sizes.end());
  serve.max_batch_size = std::max<int64_t>(serve.max_batch_size, largest);
  serve.max_batch_tokens = std::max<int64_t>(serve.max_batch_tokens, largest + 1);
  if (serve.max_context == 0) serve.max_context = options.prompt_tokens + options.new_tokens;
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(serve));
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(serve, {}));
  options.max_batch_tokens = serve.max_batch_tokens;
  options.page_size = opened.served.page_size;
  options.total_pages = opened.served.kv_pages;
  options.vocab = opened.served.vocab;
  std::fprintf(stderr, "%s; %s\n", opened.served.name.c_str(), opened.served.backend.c_str());
  TREADLE_ASSIGN_OR_RETURN(const auto rows, RunIterationBench(*opened.engine, options));
  return json ? ToJson(rows) : ToTable(rows);
}

int BenchIteration(int argc, char** argv) {
  ServeOptions serve;
  IterationBenchOptions options;
  std::string batch_sizes = "1,2,4,8,16,32";
  bool json = false;
  CLI::App app("The engine alone: one batch from prompt to last token (ORCA's Figure 9).");
  AddServeFlags(app, serve, /*engine_only=*/true);
  app.add_option("--prompt-tokens", options.prompt_tokens, "of each sequence");
  app.add_option("--new-tokens", options.new_tokens, "of each sequence");
  app.add_option("--batch-sizes", batch_sizes, "sequences, separated by commas");
  app.add_option("--repeats", options.repeats, "runs of each size; the median counts");
  app.add_flag("--json", json, "print JSON");
  if (auto code = ParseFlags(app, "bench iteration", argc, argv)) return *code;
  return Finish("bench iteration", RunIteration(serve, options, batch_sizes, json));
}

constexpr Command kBenchmarks[] = {
    {"serve", "replay a trace against a server (ORCA's Figure 10)", BenchServe},
    {"iteration", "the engine alone (ORCA's Figure 9)", BenchIteration},
    {"trace", "a timeline of all stages and ranks, for Perfetto", BenchTrace},
    {"kernels", "each op on real shapes, beside the machine's ceilings", BenchKernels},
    {"scheduler", "scheduling and bookkeeping, with an engine that does nothing", BenchScheduler},
    {"accuracy", "KL divergence of compute modes and weight formats from exact", BenchAccuracy},
    {"int8", "ways to quantize to 8 bits (LLM.int8(), Table 2.1)", BenchInt8},
};

void PrintHelp(std::FILE* out) {
  std::fprintf(out, "usage: treadle bench BENCHMARK [flags]; --help lists a benchmark's flags\n\n");
  for (const Command& benchmark : kBenchmarks) {
    std::fprintf(out, "  %-10s %s\n", benchmark.name, benchmark.help);
  }
}

}  // namespace

int RunBench(int argc, char** argv) {
  const std::string_view name = argc > 1 ? argv[1] : "";
  for (const Command& benchmark : kBenchmarks) {
    if (name == benchmark.name) return benchmark.run(argc - 1, argv + 1);
  }
  const bool help = name == "--help" || name == "-h";
  PrintHelp(help ? stdout : stderr);
  if (!help && !name.empty()) std::fprintf(stderr, "\n'%s' is no benchmark\n", argv[1]);
  return help ? 0 : 2;
}

}  // namespace treadle
