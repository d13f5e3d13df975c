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
#include "bench/load/load_report.h"
#include "bench/load/load_target.h"
#include "bench/load/trace_file.h"
#include "models/checkpoints/checkpoint.h"
#include "models/text/tokenizer.h"
#include "scheduler/policy.h"
#include "server/cli/bench/bench.h"
#include "server/cli/client_flags.h"
#include "server/cli/command.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"
#include "server/cli/random_model_flag.h"

namespace treadle {
namespace {

struct ServeBenchOptions {
  ReplayOptions replay;
  LoadServer server = {.target = "127.0.0.1:50051", .access = {}};
  ClientFlags access;
  bool in_process = false;
  ServeOptions serve;  // in this process
  SyntheticTrace trace;
  std::vector<std::string> rates;
  std::string input = "32:512";
  std::string output = "1:128";
  std::string trace_file;
  TraceFileOptions recorded;
  std::string tokenizer;
  int64_t warmups = 0;
  int64_t wait_ready = 0;
  std::vector<double> percentiles = {90, 99};
  std::vector<std::string> goodput;
  std::string label;
  std::string save_result;
  bool stop_at_eos = false;
  bool json = false;
};

constexpr TraceEntry kWarmUp = {0, 32, 8};

// One replay: a trace at one of the rates.
struct Replayed {
  std::string rate;
  std::vector<TraceEntry> trace;
  LoadResult result = {};
};

absl::StatusOr<double> ParseRate(const std::string& text) {
  if (text == "inf") return 0;  // all at once
  const std::optional<double> rate = NumberIn<double>(text);
  if (rate && std::isfinite(*rate) && *rate > 0) return *rate;
  return InvalidArgument("--request-rate is '", text,
                         "', expected requests per second above 0, or inf");
}

// Texts as tokens, by the tokenizer of a model's file or folder.
absl::StatusOr<decltype(TraceFileOptions::encode)> OpenEncoder(const std::string& path) {
  if (path.empty()) return nullptr;
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(path));
  if (checkpoint->tokenizer() == nullptr) {
    return InvalidArgument("--tokenizer: ", path, " has no tokenizer");
  }
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<const Tokenizer> tokenizer,
                           Tokenizer::Create(*checkpoint->tokenizer()));
  return [tokenizer](std::string_view text) {
    return tokenizer->Encode(text, {.add_special = false});
  };
}

absl::StatusOr<std::vector<Replayed>> TracesOf(ServeBenchOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(options.trace.input, ParseLengthRange(options.input));
  TREADLE_ASSIGN_OR_RETURN(options.trace.output, ParseLengthRange(options.output));
  std::vector<TraceEntry> recorded;
  if (!options.trace_file.empty()) {
    options.recorded.limit = options.trace.num_requests;
    options.recorded.seed = options.trace.seed;
    TREADLE_ASSIGN_OR_RETURN(options.recorded.encode, OpenEncoder(options.tokenizer));
    TREADLE_ASSIGN_OR_RETURN(recorded, ReadTrace(options.trace_file, options.recorded));
  }
  // The arrivals of a recorded trace are its own where no rate is given.
  if (!recorded.empty() && options.rates.empty()) {
    return std::vector<Replayed>{{"recorded", std::move(recorded)}};
  }
  if (options.rates.empty()) options.rates = {"1"};
  std::vector<Replayed> replays;
  for (const std::string& rate : options.rates) {
    TREADLE_ASSIGN_OR_RETURN(options.trace.request_rate, ParseRate(rate));
    replays.push_back({rate, recorded.empty() ? MakeTrace(options.trace) : recorded});
    if (!recorded.empty()) Schedule(options.trace, replays.back().trace);
  }
  return replays;
}

absl::StatusOr<std::map<std::string, double>> ParseGoodput(const std::vector<std::string>& bounds) {
  std::map<std::string, double> result;
  for (const std::string& bound : bounds) {
    const size_t colon = bound.find(':');
    const std::string name = bound.substr(0, colon);
    const auto ms = NumberIn<double>(colon == bound.npos ? "" : bound.substr(colon + 1));
    const bool known = name == "ttft" || name == "tpot" || name == "itl" || name == "e2el";
    if (!known || !ms || !(*ms > 0)) {
      return InvalidArgument("--goodput ", bound, ": expected ttft:MS, tpot:MS, itl:MS or e2el:MS");
    }
    result[name] = *ms;
  }
  return result;
}

absl::Status WarmUpAndReplay(LoadTarget& target, const ServeBenchOptions& options,
                             std::vector<Replayed>& replays) {
  ReplayOptions replay = options.replay;
  replay.ignore_eos = !options.stop_at_eos;
  if (options.warmups > 0) {
    const std::vector<TraceEntry> warmup(static_cast<size_t>(options.warmups), kWarmUp);
    TREADLE_RETURN_IF_ERROR(Replay(warmup, target, replay).status());
  }
  for (Replayed& one : replays) {
    replay.progress = ShowProgress("requests");
    TREADLE_ASSIGN_OR_RETURN(one.result, Replay(one.trace, target, replay));
  }
  return absl::OkStatus();
}

absl::Status AskServer(ServeBenchOptions& options, std::vector<Replayed>& replays) {
  TREADLE_ASSIGN_OR_RETURN(options.server.access, OpenAccess(options.access));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<LoadTarget> server,
                           ConnectToServer(options.server));
  if (options.wait_ready > 0) {
    TREADLE_RETURN_IF_ERROR(server->GetLimits(std::chrono::seconds(options.wait_ready)).status());
  }
  return WarmUpAndReplay(*server, options, replays);
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

absl::Status ServeHere(ServeBenchOptions& options, std::vector<Replayed>& replays) {
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
  const std::unique_ptr<LoadTarget> target =
      LoadInProcess(stack->pool(), {model.max_context, model.vocab}, model.end_ids);
  return WarmUpAndReplay(*target, options, replays);
}

// The output of all replays, printed or kept: JSON lines.
struct Reports {
  std::string printed;
  std::string details;
};

absl::StatusOr<Reports> ReportOn(const ServeBenchOptions& options,
                                 const std::vector<Replayed>& replays) {
  TREADLE_ASSIGN_OR_RETURN(const auto goodput, ParseGoodput(options.goodput));
  Reports reports;
  for (const Replayed& one : replays) {
    const LoadReport report = Analyze(one.result, goodput);
    std::map<std::string, std::string> about = {
        {"target", options.in_process ? "in-process" : options.server.target},
        {"request_rate", one.rate}};
    if (!options.label.empty()) about["label"] = options.label;
    about["num_prompts"] = std::to_string(one.trace.size());
    about["end_of_sequence"] = options.stop_at_eos ? "ends" : "ignored";
    if (!options.trace_file.empty()) {
      about["trace"] = options.trace_file;
    } else {
      about["burstiness"] = Str(options.trace.burstiness);
      about["seed"] = std::to_string(options.trace.seed);
      about["input_len"] = options.input;
      about["output_len"] = options.output;
    }
    reports.details +=
        ToJson(report, one.result, /*details=*/true, options.percentiles, about) + "\n";
    if (options.json) {
      reports.printed +=
          ToJson(report, one.result, /*details=*/false, options.percentiles, about) + "\n";
    } else {
      if (replays.size() > 1) reports.printed += Str(one.rate, " requests/s\n");
      reports.printed += ToTable(report, options.percentiles);
    }
  }
  return reports;
}

absl::StatusOr<std::string> RunLoad(ServeBenchOptions options) {
  TREADLE_RETURN_IF_ERROR(ReportOn(options, {}).status());  // bad flags, before the work
  TREADLE_ASSIGN_OR_RETURN(std::vector<Replayed> replays, TracesOf(options));
  TREADLE_RETURN_IF_ERROR(options.in_process ? ServeHere(options, replays)
                                             : AskServer(options, replays));
  TREADLE_ASSIGN_OR_RETURN(const Reports reports, ReportOn(options, replays));
  if (!options.save_result.empty()) {
    std::ofstream file(options.save_result);
    file << reports.details;
    if (!file.flush()) return InvalidArgument("--save-result: cannot write ", options.save_result);
  }
  return reports.printed;
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
  app.add_option("--seed", options.replay.seed, "of arrivals, lengths and prompts");
  app.add_option("--temperature", options.replay.temperature, "of sampling; 0: greedy")
      ->check(CLI::Range(0.0f, 100.0f));
  app.add_flag(
      "--ignore-eos,!--stop-at-eos", [&](int64_t count) { options.stop_at_eos = count < 0; },
      "every answer has its full length (the default), or ends as the model wants");
}

void AddReportFlags(CLI::App& app, ServeBenchOptions& options) {
  app.option_defaults()->group("Report");
  app.add_option("--goodput", options.goodput,
                 "count requests within bounds in ms: ttft:MS tpot:MS itl:MS e2el:MS");
  app.add_option("--metric-percentiles", options.percentiles, "for the report")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 100.0));
  app.add_option("--label", options.label, "name of this run in the JSON (curve of a plot)");
  app.add_option("--save-result", options.save_result,
                 "file for the full JSON, per-request lists too");
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
  options.trace.seed = options.replay.seed;
  return Finish("bench serve", RunLoad(options));
}

}  // namespace treadle
