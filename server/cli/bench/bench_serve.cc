// treadle bench serve: a trace of requests against a server, or against an engine of this process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "base/number.h"
#include "base/status.h"
#include "scheduler/policy.h"
#include "server/cli/bench/bench.h"
#include "server/cli/bench/load_run.h"
#include "server/cli/bench/random_model_flag.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"

namespace treadle {
namespace {

struct ServeBenchOptions : LoadRunOptions {
  LoadServer server = {.target = "127.0.0.1:50051", .access = {}};
  ClientFlags access;
  bool in_process = false;
  ServeOptions serve;  // in this process
  int64_t wait_ready = 0;
  std::vector<std::string> goodput;
};

absl::StatusOr<std::string> AskServer(ServeBenchOptions& options, std::vector<Replayed> replays) {
  TREADLE_ASSIGN_OR_RETURN(options.server.access, OpenAccess(options.access));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<LoadTarget> server,
                           ConnectToServer(options.server));
  if (options.wait_ready > 0) {
    TREADLE_RETURN_IF_ERROR(server->GetLimits(std::chrono::seconds(options.wait_ready)).status());
  }
  options.protocol = WordOf(kLoadProtocols, options.server.protocol);
  options.target = options.server.target;
  if (!options.metrics_url.empty()) {  // asked for: it must be there
    const absl::Status told = AskMetrics(options.metrics_url).status();
    if (!told.ok()) {
      return InvalidArgument("--metrics-url ", options.metrics_url, ": ",
                             std::string(told.message()));
    }
  }
  if (options.metrics_url.empty() && options.server.protocol == LoadProtocol::kOpenAi) {
    options.metrics_url = options.target + "/metrics";
  }
  return RunLoad(options, *server, std::move(replays));
}

// Unless told otherwise, the context is what the longest request needs.
void FitToTraces(const std::vector<Replayed>& replays, ServeOptions& serve) {
  const bool free = serve.max_context == 0;
  const auto fit = [&](const TraceEntry& entry) {
    const int64_t tokens = int64_t{entry.input_tokens} + entry.output_tokens;
    if (free) serve.max_context = std::max(serve.max_context, tokens);
  };
  fit(kWarmUp);
  for (const Replayed& one : replays) {
    std::ranges::for_each(one.trace, fit);
    serve.max_queue = std::max<int64_t>(serve.max_queue, std::ssize(one.trace));
  }
}

absl::StatusOr<std::string> ServeHere(ServeBenchOptions& options, std::vector<Replayed> replays) {
  ServeOptions& serve = options.serve;
  TREADLE_RETURN_IF_ERROR(Policy::Create(serve.policy).status());  // before minutes of loading
  FitToTraces(replays, serve);
  TREADLE_ASSIGN_OR_RETURN(OpenedModel opened, OpenModel(serve));
  std::fprintf(stderr, "%s; %s; %s\n", opened.served.name.c_str(), opened.served.backend.c_str(),
               opened.kv.ToString().c_str());
  SchedulingOptions scheduling = SchedulingFrom(serve, opened);
  ChooseBatchAtStart(serve, opened, scheduling);
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<ServingStack> stack,
      ServingStack::Create(std::move(opened.served), std::move(opened.engine), scheduling));
  TREADLE_RETURN_IF_ERROR(stack->Start());
  if (!stack->chosen().empty()) std::fprintf(stderr, "%s\n", stack->chosen().c_str());
  const ServedModel& model = stack->model();
  const std::unique_ptr<LoadTarget> target = LoadInProcess(
      stack->pool(), {model.max_context, model.vocab, model.name, "{}"}, model.end_ids);
  options.protocol = options.target = "in-process";
  return RunLoad(options, *target, std::move(replays));
}

absl::StatusOr<std::string> RunBench(ServeBenchOptions options) {
  TREADLE_ASSIGN_OR_RETURN(options.report.goodput, ParseGoodput(options.goodput));
  TREADLE_ASSIGN_OR_RETURN(std::vector<Replayed> replays, TracesOf(options));
  return options.in_process ? ServeHere(options, std::move(replays))
                            : AskServer(options, std::move(replays));
}

void AddTraceFlags(CLI::App& app, ServeBenchOptions& options) {
  app.option_defaults()->group("Requests");
  app.add_option("--num-prompts", options.trace.num_requests, "requests")
      ->check(CLI::Range(int64_t{1}, int64_t{10'000'000}));
  app.add_option("--request-rate", options.rates,
                 "requests per second; inf: all at once; several, separated by commas: one after "
                 "the other (default 1; of a recorded trace: its own times)")
      ->delimiter(',');
  app.add_option("--burstiness", options.trace.burstiness,
                 "shape of gamma-distributed gaps; 1: Poisson; inf: all gaps are equal")
      ->check(CLI::Range(0.01, std::numeric_limits<double>::infinity()));
  app.add_option("--input-len", options.input,
                 "prompt tokens: N, LOW:HIGH (uniform), or lognormal:MEAN:STDDEV[:MAX]");
  app.add_option("--output-len", options.output, "generated tokens, likewise");
  app.add_option(
      "--trace", options.trace_file,
      "recorded lengths and arrivals instead (Mooncake JSONL, Azure or BurstGPT CSV), or "
      "conversations (ShareGPT JSON)");
  app.add_option("--time-scale", options.recorded.time_scale,
                 "multiplies a recorded trace's arrival times")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--tokenizer", options.tokenizer,
                 "model file or folder whose tokenizer makes tokens of conversations");
  app.add_option("--think-time", options.recorded.think_time,
                 "mean seconds between an answer and its conversation's next turn (exponential)")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--max-concurrency", options.replay.max_concurrency,
                 "requests under way at once; 0: no limit")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--num-warmups", options.warmups, "short requests before the run")
      ->check(CLI::Range(0, 1000));
  app.add_option("--seed", options.trace.seed, "of arrivals, lengths and prompts");
  app.add_option("--seeds", options.seeds,
                 "runs with this seed and those that follow, and means with confidence intervals")
      ->check(CLI::Range(1, 1000));
  app.add_option("--temperature", options.replay.temperature, "of sampling; 0: greedy")
      ->check(CLI::Range(0.0f, 100.0f));
  app.add_flag(
      "--ignore-eos,!--stop-at-eos", [&](int64_t count) { options.replay.ignore_eos = count > 0; },
      "every answer has its full length (the default), or ends as the model wants");
}

void AddReportFlags(CLI::App& app, ServeBenchOptions& options) {
  app.option_defaults()->group("Report");
  app.add_option("--goodput", options.goodput,
                 "count requests within bounds in ms: ttft:MS tpot:MS itl:MS e2el:MS");
  app.add_option("--search", options.search,
                 "search from --request-rate on for the highest rate at which this share of the "
                 "requests (0.99) is within --goodput")
      ->check(CLI::Range(0.01, 1.0));
  app.add_option("--steady-state", options.report.steady_from,
                 "count only what happens from this many seconds on, until the last arrival")
      ->check(CLI::Range(0.0, 1e6));
  app.add_option("--metric-percentiles", options.report.percentiles, "for the report")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 100.0));
  app.add_option("--label", options.label, "name of this run in the JSON (curve of a plot)");
  app.add_option("--save-result", options.save_result,
                 "file for the full JSON, per-request lists too");
  app.add_option("--html", options.html, "file for a report with plots, whole in itself");
  app.add_option("--metrics-url", options.metrics_url,
                 "the server's Prometheus metrics, which tell of guessed tokens (default: /metrics "
                 "of an openai target)");
  app.add_flag("--json", options.json, "print the summary as one JSON line");
}

// The target: a server, or an engine here, whose flags are those of `serve`.
void AddTargetFlags(CLI::App& app, ServeBenchOptions& options) {
  app.option_defaults()->group("Target");
  CLI::Option* const target =
      app.add_option("--target", options.server.target,
                     "the server's address; with --protocol openai also a URL (http://HOST:PORT)");
  AddChoice(app, "--protocol", options.server.protocol, kLoadProtocols,
            "grpc (Treadle's), openai (/v1/completions of any server), or vllm-grpc (the engine "
            "protocol of gateways)");
  app.add_option("--vocab-size", options.server.vocab,
                 "tokens that the model knows, of a server of --protocol openai that does not say")
      ->check(CLI::PositiveNumber);
  AddClientFlags(app, options.access);
  app.add_option("--wait-ready", options.wait_ready, "wait this many seconds for the server")
      ->check(CLI::Range(0, 3600));
  CLI::Option* const here =
      app.add_flag("--in-process", options.in_process, "no server: an engine of this process")
          ->excludes(target);
  AddServeFlags(app, options.serve, /*engine_only=*/true);
  for (const ServeFlag& flag : ServeFlags()) {
    if (flag.engine) app.get_option(flag.name)->needs(here);
  }
  AddRandomModelFlag(app, options.serve.model, kInsteadOfModel)
      ->needs(here)
      ->excludes(app.get_option("--model"));
  app.add_option("--policy", options.serve.policy,
                 "fcfs (iteration-level) or request-level (the baseline)")
      ->needs(here);
}

}  // namespace

int BenchServe(int argc, char** argv) {
  ServeBenchOptions options;
  CLI::App app(
      "Replays a trace of requests against a server, or an engine of this process. Latency counts "
      "from the scheduled arrival.");
  AddTraceFlags(app, options);
  AddReportFlags(app, options);
  AddTargetFlags(app, options);
  if (auto code = ParseFlags(app, "bench serve", argc, argv)) return *code;
  return Finish("bench serve", RunBench(options));
}

}  // namespace treadle
