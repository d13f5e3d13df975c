// treadle bench: one row of the table each; here those of an engine alone, bench iteration and
// bench trace (a timeline of some iterations over all stages and ranks).
#include "server/cli/bench/bench.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"
#include "bench/iteration/iteration_bench.h"
#include "bench/iteration/timeline.h"
#include "models/adapters/adapter_file.h"
#include "server/cli/bench/random_model_flag.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"

namespace treadle {
namespace {

absl::StatusOr<std::string> RunIteration(ServeOptions serve, IterationBenchOptions options,
                                         const std::vector<std::string>& adapters, bool json) {
  const int32_t largest = std::ranges::max(options.batch_sizes);
  serve.max_batch_size =
      std::max<int64_t>({serve.max_batch_size, kDefaultBatchSize, int64_t{largest}});
  if (serve.max_batch_tokens > 0) {
    serve.max_batch_tokens = std::max<int64_t>(serve.max_batch_tokens, largest + 1);
  }
  const int32_t longest = std::ranges::max(options.prompt_tokens);
  if (serve.max_context == 0) serve.max_context = int64_t{longest} + options.new_tokens;
  TREADLE_ASSIGN_OR_RETURN(const CheckedModel checked, CheckModel(serve));
  std::vector<std::shared_ptr<const AdapterFile>> files;
  for (const std::string& path : adapters) {
    TREADLE_ASSIGN_OR_RETURN(files.emplace_back(),
                             AdapterFile::Open(path, checked.checkpoint->config()));
    options.adapters.push_back(files.back()->id());
  }
  TREADLE_ASSIGN_OR_RETURN(
      OpenedModel opened,
      OpenModel(checked, ShowProgress("loading " + serve.model, checked.checkpoint->file_bytes())));
  for (auto& file : files) TREADLE_RETURN_IF_ERROR(opened.engine->LoadAdapter(std::move(file)));
  options.max_batch_tokens = opened.max_batch_tokens;
  options.paging = opened.served.paging;
  options.total_pages = opened.served.kv_pages;
  options.vocab = opened.served.vocab;
  options.weight_bytes = opened.weight_bytes;
  options.kv_bytes_per_token = opened.kv.bytes_per_token;
  const std::string& model = opened.served.name;
  const std::string& backend = opened.served.backend;
  std::fprintf(stderr, "%s; %s; weights %.1f MB\n", model.c_str(), backend.c_str(),
               static_cast<double>(opened.weight_bytes) * 1e-6);
  options.progress = ShowProgress("batches");
  TREADLE_ASSIGN_OR_RETURN(const auto rows, RunIterationBench(*opened.engine, options));
  if (!json) return ToTable(rows);
  return nlohmann::ordered_json({{"model", model},
                                 {"backend", backend},
                                 {"weight_bytes", opened.weight_bytes},
                                 {"rows", ToJson(rows)}})
      .dump();
}

int BenchIteration(int argc, char** argv) {
  ServeOptions serve;
  IterationBenchOptions options;
  std::vector<std::string> adapters;
  bool json = false;
  CLI::App app("The engine alone: one batch from prompt to last token (ORCA's Figure 9).");
  AddServeFlags(app, serve, /*engine_only=*/true);
  AddRandomModelFlag(app, serve.model, kInsteadOfModel)->excludes(app.get_option("--model"));
  app.add_option("--prompt-tokens", options.prompt_tokens,
                 "of each sequence; several, separated by commas: one after the other")
      ->delimiter(',');
  app.add_option("--new-tokens", options.new_tokens, "of each sequence");
  app.add_option("--batch-sizes", options.batch_sizes, "sequences, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(1, 65536));
  app.add_option("--repeats", options.repeats, "runs of each size; the median counts");
  app.add_option("--adapters", adapters,
                 "LoRA adapters, paths separated by commas: each batch runs without and with them, "
                 "its requests having one each, in turns")
      ->delimiter(',');
  app.add_flag("--one-at-a-time", options.one_at_a_time,
               "no iteration is submitted before the last one's result: the gap between them is "
               "what the host takes, which working ahead hides");
  app.add_flag("--json", json, "print JSON");
  if (auto code = ParseFlags(app, "bench iteration", argc, argv)) return *code;
  return Finish("bench iteration", RunIteration(serve, options, adapters, json));
}

absl::Status Record(ServeOptions serve, TimelineOptions options, const std::string& path) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(serve));
  std::ofstream file(path);  // before the work
  if (!file) return InvalidArgument("--out: cannot write ", path);
  if (serve.max_context == 0) serve.max_context = options.prompt_tokens + options.new_tokens;
  TREADLE_ASSIGN_OR_RETURN(const OpenedModel opened, OpenModel(serve));
  std::fprintf(stderr, "%s; %s\n", opened.served.name.c_str(), opened.served.backend.c_str());
  if (options.requests == 0) options.requests = static_cast<int32_t>(2 * serve.stages());
  options.max_batch_size = SchedulingFrom(serve, opened).max_batch_size;
  options.max_batch_tokens = opened.max_batch_tokens;
  options.paging = opened.served.paging;
  options.total_pages = opened.served.kv_pages;
  options.vocab = opened.served.vocab;
  TREADLE_ASSIGN_OR_RETURN(const std::vector<TraceEvent> events,
                           RecordTimeline(*opened.engine, options));
  file << ToChromeTrace(events);
  if (!file.flush()) return InvalidArgument("--out: cannot write ", path);
  std::fputs(ToTable(events).c_str(), stdout);
  std::fprintf(stderr, "%s: open it in https://ui.perfetto.dev or chrome://tracing\n",
               path.c_str());
  return absl::OkStatus();
}

int BenchTrace(int argc, char** argv) {
  ServeOptions serve;
  TimelineOptions options;
  options.requests = 0;
  std::string path = "trace.json";
  CLI::App app("Records what every stage and rank did during some iterations.");
  AddServeFlags(app, serve, /*engine_only=*/true);
  app.add_option("--out", path, "file for the timeline, Chrome trace JSON");
  app.add_option("--requests", options.requests, "requests at once; 0: two per stage")
      ->check(CLI::Range(0, 65536));
  app.add_option("--prompt-tokens", options.prompt_tokens, "of each request")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--new-tokens", options.new_tokens, "of each request")
      ->check(CLI::Range(1, 1 << 20));
  if (auto code = ParseFlags(app, "bench trace", argc, argv)) return *code;
  return Finish("bench trace", Record(std::move(serve), options, path));
}

constexpr Command kBenchmarks[] = {
    {"serve", "replay a trace against a server (ORCA's Figure 10)", BenchServe},
    {"iteration", "the engine alone (ORCA's Figure 9)", BenchIteration},
    {"trace", "a timeline of all stages and ranks, for Perfetto", BenchTrace},
};

}  // namespace

int RunBench(int argc, char** argv) {
  return RunBenchmark("treadle bench", kBenchmarks, argc, argv);
}

}  // namespace treadle
