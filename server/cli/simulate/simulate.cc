// treadle simulate: a trace on hardware that is not there, by the real scheduler and a model of
// time.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "bench/load/load_report.h"
#include "bench/load/trace.h"
#include "bench/load/trace_file.h"
#include "bench/simulate/figures.h"
#include "bench/simulate/search.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/random/random_checkpoint.h"
#include "scheduler/policy.h"
#include "server/cli/command.h"
#include "server/cli/simulate/measured.h"
#include "server/cli/simulate/recording.h"

namespace treadle {
namespace {

struct SimulateFlags {
  std::string figure, recording;
  std::string model, hardware = "h100";
  int64_t count = 0;
  RooflineOptions machine;
  std::vector<std::string> weights;
  Serving serving;
  std::vector<int64_t> batch_sizes;
  SyntheticTrace trace;
  std::vector<double> rates;
  std::string input = "32:512", output = "1:128", trace_file;
  std::vector<std::string> goodput;
  bool calibrate = false;
  std::string ledger, sweep;
  bool json = false;

  bool measured() const { return calibrate || !ledger.empty(); }
};

std::string Joined(const std::vector<std::string_view>& names) {
  return absl::StrJoin(std::vector<std::string>(names.begin(), names.end()), ", ");
}

// A recorded trace is played faster or slower, to the rate that is asked.
absl::StatusOr<std::function<std::vector<TraceEntry>(double)>> TraceOf(SimulateFlags& flags) {
  if (flags.trace_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(flags.trace.input, ParseLengthRange(flags.input));
    TREADLE_ASSIGN_OR_RETURN(flags.trace.output, ParseLengthRange(flags.output));
    // A search needs a trace that lasts: what comes in a moment is gone in a moment.
    return [trace = flags.trace, lasts = flags.count > 0](double rate) mutable {
      constexpr double kSeconds = 10, kMax = 2'000;
      const auto least = static_cast<int64_t>(std::min(kSeconds * rate, kMax));
      if (lasts) trace.num_requests = std::max(trace.num_requests, least);
      trace.request_rate = rate;
      return MakeTrace(trace);
    };
  }
  const auto refuse = [](std::string_view) -> absl::StatusOr<std::vector<int32_t>> {
    return InvalidArgument("has conversations, expected a trace of lengths and arrivals");
  };
  TREADLE_ASSIGN_OR_RETURN(
      const std::vector<TraceEntry> recorded,
      ReadTrace(flags.trace_file, {.limit = flags.trace.num_requests, .encode = refuse}));
  return [recorded](double rate) {
    std::vector<TraceEntry> trace = recorded;
    const double own = static_cast<double>(trace.size()) / std::max(1e-9, trace.back().arrival);
    for (TraceEntry& entry : trace) entry.arrival *= rate > 0 ? own / rate : 1;
    return trace;
  };
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenShape(const std::string& model) {
  if (model.empty()) {
    return InvalidArgument("--model is missing, expected a model's file or folder, or a shape: ",
                           RandomShapes());
  }
  const bool file = std::filesystem::exists(model);
  return Checkpoint::Open(file ? model : Str(kRandomPrefix, model));
}

absl::StatusOr<std::string> RunFigure(const SimulateFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(
      const Figure figure,
      SimulateFigure(flags.figure, flags.trace.num_requests, flags.trace.seed));
  return flags.json ? ToJson(figure) : ToTable(figure);
}

// The machine that a trace runs on, and how the report describes it.
struct Machine {
  std::function<absl::StatusOr<SimulationResult>(const std::vector<TraceEntry>&)> run;
  std::string text;
};

absl::StatusOr<Machine> MachineOf(const SimulateFlags& flags, const Checkpoint& checkpoint) {
  TREADLE_ASSIGN_OR_RETURN(const Roofline roofline, Roofline::Of(checkpoint, flags.machine));
  return Machine{[roofline, serving = flags.serving](const std::vector<TraceEntry>& trace) {
                   return SimulateOn(roofline, serving, trace);
                 },
                 roofline.ToString()};
}

absl::StatusOr<Machine> ThisMachine(const SimulateFlags& flags, const Checkpoint& checkpoint) {
  ServeOptions serve;
  serve.model = checkpoint.path();
  serve.weights = flags.machine.weights;
  serve.max_batch_size = flags.serving.max_batch_size;
  serve.max_batch_tokens = flags.machine.max_batch_tokens;
  serve.max_context = flags.machine.max_context;
  serve.tensor_parallel = flags.machine.tensor_parallel;
  serve.policy = flags.serving.policy;
  TREADLE_ASSIGN_OR_RETURN(const MeasuredMachine here,
                           flags.calibrate
                               ? MeasureHere(serve)
                               : MeasuredBy(flags.ledger, serve, checkpoint, flags.trace.seed));
  return Machine{[options = here.simulation](const std::vector<TraceEntry>& trace) {
                   return Simulate(trace, options);
                 },
                 here.text};
}

absl::StatusOr<std::string> RunTrace(SimulateFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(const auto goodput, ParseGoodput(flags.goodput));
  TREADLE_ASSIGN_OR_RETURN(const auto trace, TraceOf(flags));
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, OpenShape(flags.model));
  TREADLE_ASSIGN_OR_RETURN(flags.machine.hardware, FindHardware(flags.hardware));
  if (flags.weights.empty()) flags.weights = {""};
  if (flags.count > 0) {
    if (flags.measured()) {
      return InvalidArgument(flags.calibrate ? "--calibrate" : "--ledger",
                             " is of one machine, expected no --count");
    }
    if (goodput.empty()) {
      return InvalidArgument(
          "--count searches for what serves most within a target, but --goodput is missing; "
          "expected such as ttft:500,itl:50");
    }
    SearchOptions search{.machine = flags.machine,
                         .serving = flags.serving,
                         .count = flags.count,
                         .weights = flags.weights,
                         .goodput = goodput,
                         .trace = trace};
    if (!flags.batch_sizes.empty()) search.batch_sizes = flags.batch_sizes;
    TREADLE_ASSIGN_OR_RETURN(const std::vector<SearchRow> rows, Search(*checkpoint, search));
    if (!flags.sweep.empty()) {
      TREADLE_ASSIGN_OR_RETURN(const std::string page, SweepPage(*checkpoint, search, rows));
      TREADLE_RETURN_IF_ERROR(WriteTo("--sweep", flags.sweep, page));
    }
    if (flags.json) return ToJson(rows);
    return Str(ToTable(rows), "requests/s: the most at which ", kAttained * 100,
               " % of the requests are within ", absl::StrJoin(flags.goodput, ", "), " ms\n");
  }
  if (flags.weights.size() > 1 || flags.batch_sizes.size() > 1) {
    return InvalidArgument(
        "several --weights or --max-batch-size are for a search, with --count; "
        "expected one of each without");
  }
  if (!flags.batch_sizes.empty()) flags.serving.max_batch_size = flags.batch_sizes[0];
  flags.machine.max_batch_tokens =
      std::max(flags.machine.max_batch_tokens, 2 * flags.serving.max_batch_size);
  TREADLE_ASSIGN_OR_RETURN(flags.machine.weights, WeightPlan::Parse(flags.weights[0]));
  TREADLE_RETURN_IF_ERROR(flags.machine.weights.CheckAgainst(*checkpoint));
  TREADLE_ASSIGN_OR_RETURN(const Machine machine, flags.measured() ? ThisMachine(flags, *checkpoint)
                                                                   : MachineOf(flags, *checkpoint));
  std::string out = flags.json ? "" : machine.text;
  if (flags.rates.empty()) flags.rates = {flags.trace_file.empty() ? 1.0 : 0.0};
  for (const double rate : flags.rates) {
    TREADLE_ASSIGN_OR_RETURN(const SimulationResult result, machine.run(trace(rate)));
    const LoadReportOptions told = {.goodput = goodput};
    const LoadReport report = Analyze(result.load, told);
    if (flags.json) {
      const nlohmann::ordered_json about = {
          {"target", "simulated"},
          {"model", checkpoint->path()},
          {"hardware", flags.measured() ? "measured" : flags.hardware},
          {"label", Str(flags.serving.policy, ", max_batch_size ", flags.serving.max_batch_size)},
          {"request_rate", rate},
          {"num_prompts", result.load.requests.size()},
          {"iterations", result.iterations},
          {"rows", result.rows},
          {"padding", result.padding},
          {"busy", result.busy}};
      out += Str(ToJson(report, result.load, /*details=*/false, told, about).dump(), "\n");
      continue;
    }
    if (rate > 0) out += absl::StrFormat("\n%g requests/s\n", rate);
    out += ToTable(report, told);
    absl::StrAppendFormat(
        &out,
        "%d iterations of %.1f rows, %.1f of them padding; stages at work %.0f %% of "
        "the time\n",
        result.iterations,
        static_cast<double>(result.rows + result.padding) /
            static_cast<double>(std::max<int64_t>(1, result.iterations)),
        static_cast<double>(result.padding) /
            static_cast<double>(std::max<int64_t>(1, result.iterations)),
        100 * result.busy);
  }
  return out;
}

void AddMachineFlags(CLI::App& app, SimulateFlags& flags) {
  app.option_defaults()->group("Machine");
  app.add_option(
      "--model", flags.model,
      Str("a model's file or folder, of which headers are read, or a shape: ", RandomShapes()));
  std::vector<std::string_view> names;
  for (const Hardware& row : HardwareTable()) names.push_back(row.name);
  app.add_option("--hardware", flags.hardware,
                 Str("accelerators by their data sheet: ", Joined(names)));
  app.add_flag("--calibrate", flags.calibrate,
               "this machine instead: loads the model, runs iterations for some seconds, and fits "
               "what they cost")
      ->excludes("--hardware");
  app.add_option("--ledger", flags.ledger,
                 "instead: the machine of a server, by what its iterations took "
                 "(`treadle serve --ledger-file`, with --speculate off)")
      ->excludes("--hardware")
      ->excludes("--calibrate");
  app.add_option("--tensor-parallel", flags.machine.tensor_parallel, "GPUs that share each layer");
  app.add_option("--pipeline-parallel", flags.machine.stages, "stages that share the layers out");
  app.add_option("--weights", flags.weights,
                 "weight format, as `treadle serve` takes it; several, separated by spaces: a "
                 "search tries each");
  app.add_option("--max-context", flags.machine.max_context, "tokens of a request; 0: the model's")
      ->check(CLI::Range(0, 1 << 30));
  static const std::pair<const char*, const Efficiency*> kEngines[] = {
      {"treadle", &kTreadleEfficiency},
      {"orca", &kOrcaEfficiency},
      {"faster-transformer", &kFasterTransformerEfficiency}};
  AddWords(
      app, "--engine", {kEngines[0].first, kEngines[1].first, kEngines[2].first},
      [&](size_t index) { flags.machine.efficiency = *kEngines[index].second; },
      "whose share of a data sheet's numbers is reached");
}

void AddRequestFlags(CLI::App& app, SimulateFlags& flags) {
  app.option_defaults()->group("Requests");
  app.add_option("--num-prompts", flags.trace.num_requests, "requests")
      ->check(CLI::Range(int64_t{1}, int64_t{10'000'000}));
  app.add_option("--request-rate", flags.rates,
                 "requests per second, Poisson arrivals; several, separated by commas: one after "
                 "the other; 0: all at once, or as recorded")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1e9));
  app.add_option("--input-len", flags.input, "prompt tokens: N, or LOW:HIGH (uniform)");
  app.add_option("--output-len", flags.output, "generated tokens: N, or LOW:HIGH (uniform)");
  app.add_option("--trace", flags.trace_file,
                 "recorded trace instead (Mooncake JSONL, Azure or BurstGPT CSV)");
  app.add_option("--seed", flags.trace.seed, "of arrivals and lengths");
}

void AddServingFlags(CLI::App& app, SimulateFlags& flags) {
  app.option_defaults()->group("Scheduling");
  app.add_option("--policy", flags.serving.policy,
                 Str("scheduling policy: ", Joined(Policy::Names())));
  app.add_option("--max-batch-size", flags.batch_sizes,
                 "sequences in one iteration; several, separated by commas: a search tries each")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--max-batch-tokens", flags.machine.max_batch_tokens, "tokens in one iteration")
      ->check(CLI::Range(2, 1 << 24));
  app.add_option("--microbatch-size", flags.serving.microbatch_size,
                 "sequences, of faster-transformer's batches on several stages; 0: the batch's")
      ->check(CLI::Range(0, 1 << 20));
  app.option_defaults()->group("Report");
  app.add_option("--count", flags.count,
                 "search: all splits of so many GPUs, weights and batch sizes, by the requests/s "
                 "that they serve within --goodput")
      ->check(CLI::Range(1, 4096));
  app.add_option(
         "--sweep", flags.sweep,
         "also writes a page (HTML) that draws how the best of --count answer as load grows")
      ->needs(app.get_option("--count"));
  app.add_option("--goodput", flags.goodput,
                 "bounds in ms, separated by commas: ttft:MS, tpot:MS, itl:MS, e2el:MS")
      ->delimiter(',');
  CLI::Option* const figure =
      app.add_option("--figure", flags.figure,
                     Str("instead of a model: a figure of ORCA's evaluation, both systems: ",
                         Joined(FigureNames())));
  figure->excludes(app.get_option("--model"));
  app.add_option(
         "--recording", flags.recording,
         "instead: a file of `treadle serve --record`; compares the plans that its requests "
         "and times lead to with those that are in it")
      ->excludes(app.get_option("--model"))
      ->excludes(figure);
  app.add_flag("--json", flags.json, "print JSON lines");
}

}  // namespace

int RunSimulate(int argc, char** argv) {
  SimulateFlags flags;
  flags.trace.num_requests = 1000;
  flags.machine.efficiency = kTreadleEfficiency;
  flags.serving.policy.clear();  // fcfs, or as recorded
  CLI::App app(
      "Serves a trace of requests on hardware that is not there: the real scheduler, with an "
      "engine of virtual time, whose iterations cost what a roofline of the data sheet says.");
  AddMachineFlags(app, flags);
  AddRequestFlags(app, flags);
  AddServingFlags(app, flags);
  if (auto code = ParseFlags(app, "simulate", argc, argv)) return *code;
  if (!flags.recording.empty())
    return Finish("simulate", ReplayPlans(flags.recording, flags.serving.policy));
  if (!flags.figure.empty()) return Finish("simulate", RunFigure(flags));
  if (flags.serving.policy.empty()) flags.serving.policy = "fcfs";
  return Finish("simulate", RunTrace(flags));
}

}  // namespace treadle
