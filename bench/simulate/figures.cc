#include "bench/simulate/figures.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/load/load_report.h"
#include "bench/simulate/roofline.h"
#include "bench/simulate/search.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/random/random_checkpoint.h"

namespace treadle {
namespace {

constexpr int64_t kContext = 2048;          // section 6: of all models
constexpr int64_t kWholePrompts = 1 << 20;  // tokens in an iteration: no prompt is cut

struct Setup {
  std::string_view name, shape;
  int64_t stages, ranks;                             // Table 1
  LengthRange input = {32, 512}, output = {1, 128};  // section 6.2
  std::vector<double> rates = {};                    // none: Figure 9
};

const std::vector<Setup>& Setups() {
  static const std::vector<double> kFew = {0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.5,
                                           2,    3,    4,   5,    6,   7,   8,   9,   10,  14};
  static const std::vector<Setup> setups = {
      {"9a", "orca-13b", 1, 1},
      {"9b", "orca-101b", 1, 8},
      {"9c", "orca-175b", 2, 8},
      {"10a", "orca-101b", 1, 8, {32, 512}, {1, 128}, kFew},
      {"10b", "orca-175b", 2, 8, {32, 512}, {1, 128}, kFew},
      {"10c", "orca-341b", 4, 8, {32, 512}, {1, 128}, kFew},
      {"11a", "orca-175b", 2, 8, {32, 32}, {32, 32}, kFew},
      {"11b", "orca-175b", 2, 8, {128, 128}, {32, 32}, kFew},
      {"11c", "orca-175b", 2, 8, {32, 32}, {128, 128}, kFew},
      {"11d", "orca-175b", 2, 8, {128, 128}, {128, 128}, kFew}};
  return setups;
}

// One curve: a system with its batch sizes.
struct Curve {
  std::string label;
  bool orca;
  int64_t max_batch_size, microbatch_size;
};

std::vector<Curve> CurvesOf(const Setup& setup) {
  std::vector<Curve> curves;
  for (const int64_t size : {1, 2, 4, 8, 16, 32}) {
    curves.push_back({Str("orca(", size, ")"), true, size, 0});
  }
  const std::vector<std::pair<int64_t, int64_t>> sizes =
      setup.stages == 1 ? std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {2, 2}, {4, 4}, {8, 8}}
                        : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {4, 1}, {4, 4}, {8, 1},
                                                                   {8, 2}, {8, 4}, {8, 8}};
  for (const auto& [size, microbatch] : sizes) {
    curves.push_back({Str("ft(", size, ",", microbatch, ")"), false, size, microbatch});
  }
  return curves;
}

absl::StatusOr<Roofline> MachineOf(const Checkpoint& checkpoint, const Setup& setup, bool orca) {
  RooflineOptions options;
  TREADLE_ASSIGN_OR_RETURN(options.hardware, FindHardware("a100-40g"));
  options.efficiency = orca ? kOrcaEfficiency : kFasterTransformerEfficiency;
  // Control messages of FasterTransformer wait for GPUs where there are several stages.
  if (setup.stages == 1) options.efficiency.iteration = 0;
  options.stages = setup.stages;
  options.tensor_parallel = setup.ranks;
  options.max_context = kContext;
  options.max_batch_tokens = kWholePrompts;
  return Roofline::Of(checkpoint, options);
}

// Whether so many sequences of so many tokens fit.
bool HasRoom(const Roofline& machine, int64_t sequences, int64_t tokens) {
  const KvMemoryPlan& kv = machine.kv();
  return sequences * kv.paging.PagesFor(tokens)[PageKind::kWhole] <= kv.pages[PageKind::kWhole];
}

// Section 6.1: all requests of a batch have as many input tokens, and generate 32.
absl::Status RunBatches(const Roofline& machine, bool orca, Figure& figure) {
  constexpr int32_t kNewTokens = 32;
  for (const int32_t prompt : {32, 128}) {
    for (const int64_t size : {1, 2, 4, 8, 16, 32}) {
      FigurePoint& point = figure.points.emplace_back();
      point.label = Str(orca ? "orca(" : "ft(", prompt, ")");
      point.x = static_cast<double>(size);
      // FasterTransformer allocates the longest sequence for each (section 6.1).
      if (!HasRoom(machine, size, orca ? prompt + kNewTokens : kContext)) continue;
      const std::vector<TraceEntry> batch(static_cast<size_t>(size), {0, prompt, kNewTokens});
      const Serving serving{orca ? "request-level" : "faster-transformer", size, size,
                            static_cast<int>(machine.options().stages)};
      TREADLE_ASSIGN_OR_RETURN(const SimulationResult result, SimulateOn(machine, serving, batch));
      point.latency_ms = result.load.duration * 1e3;
      point.throughput = point.x / result.load.duration;
    }
  }
  return absl::OkStatus();
}

absl::Status RunTraces(const Roofline& machine, const Setup& setup, bool orca, int64_t num_requests,
                       uint64_t seed, Figure& figure) {
  const bool homogeneous = setup.input.low == setup.input.high;
  for (const Curve& curve : CurvesOf(setup)) {
    if (curve.orca != orca) continue;
    if (!orca && !HasRoom(machine, curve.max_batch_size, kContext)) continue;
    double most = 0;
    for (const double rate : setup.rates) {
      const std::vector<TraceEntry> trace = MakeTrace({.num_requests = num_requests,
                                                       .request_rate = rate,
                                                       .input = setup.input,
                                                       .output = setup.output,
                                                       .seed = seed});
      const Serving serving{orca ? "fcfs" : "faster-transformer", curve.max_batch_size,
                            curve.microbatch_size, static_cast<int>(setup.stages)};
      TREADLE_ASSIGN_OR_RETURN(const SimulationResult result, SimulateOn(machine, serving, trace));
      const LoadReport report = Analyze(result.load, {});
      std::vector<double> latencies =
          report.samples_ms.at(homogeneous ? "e2el" : "normalized_latency");
      std::ranges::sort(latencies);
      figure.points.push_back(
          {curve.label, rate, report.request_throughput, Percentile(latencies, 50)});
      // Beyond its capacity a system's throughput says nothing new.
      if (report.request_throughput < 0.8 * rate && report.request_throughput < 1.02 * most) break;
      most = std::max(most, report.request_throughput);
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::string_view> FigureNames() {
  std::vector<std::string_view> names;
  for (const Setup& setup : Setups()) names.push_back(setup.name);
  return names;
}

absl::StatusOr<Figure> SimulateFigure(std::string_view name, int64_t num_requests, uint64_t seed) {
  const auto setup = std::ranges::find(Setups(), name, &Setup::name);
  if (setup == Setups().end()) {
    std::string names;
    for (const Setup& row : Setups()) names += Str(names.empty() ? "" : ", ", row.name);
    return NotFound("figure '", name, "' is unknown, expected one of: ", names);
  }
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                           Checkpoint::Open(Str(kRandomPrefix, setup->shape)));
  Figure figure;
  figure.title = Str("Figure ", name, ": ", setup->shape, ", ", setup->stages, " x ", setup->ranks,
                     " A100 40 GB");
  for (const bool orca : {true, false}) {
    TREADLE_ASSIGN_OR_RETURN(const Roofline machine, MachineOf(*checkpoint, *setup, orca));
    TREADLE_RETURN_IF_ERROR(setup->rates.empty()
                                ? RunBatches(machine, orca, figure)
                                : RunTraces(machine, *setup, orca, num_requests, seed, figure));
  }
  return figure;
}

double ThroughputAt(const Figure& figure, std::string_view label, double latency_ms) {
  double most = 0;
  for (size_t i = 0; i < figure.points.size(); ++i) {
    const FigurePoint& point = figure.points[i];
    if (!point.label.starts_with(label)) continue;
    if (point.latency_ms <= latency_ms) {
      most = std::max(most, point.throughput);
      continue;
    }
    if (i == 0) continue;
    const FigurePoint& before = figure.points[i - 1];
    if (before.label != point.label || before.latency_ms > latency_ms) continue;
    const double part = (latency_ms - before.latency_ms) / (point.latency_ms - before.latency_ms);
    most = std::max(most, before.throughput + part * (point.throughput - before.throughput));
  }
  return most;
}

double MostThroughput(const Figure& figure, std::string_view label) {
  double most = 0;
  for (const FigurePoint& point : figure.points) {
    if (point.label.starts_with(label)) most = std::max(most, point.throughput);
  }
  return most;
}

std::string ToTable(const Figure& figure) {
  std::string out = figure.title + "\n";
  const bool batches = figure.title.starts_with("Figure 9");
  const bool whole = figure.title.starts_with("Figure 11");
  absl::StrAppendFormat(&out, "%-12s %10s %12s %16s\n", "system", batches ? "batch" : "offered/s",
                        "requests/s",
                        batches ? "batch ms"
                        : whole ? "median ms"
                                : "median ms/token");
  for (const FigurePoint& point : figure.points) {
    if (point.latency_ms == 0) {
      absl::StrAppendFormat(&out, "%-12s %10g %29s\n", point.label, point.x, "out of memory");
    } else {
      absl::StrAppendFormat(&out, "%-12s %10g %12.3f %16.1f\n", point.label, point.x,
                            point.throughput, point.latency_ms);
    }
  }
  return out;
}

std::string ToJson(const Figure& figure) {
  std::string out;
  for (const FigurePoint& point : figure.points) {
    out += nlohmann::ordered_json({{"figure", figure.title},
                                   {"label", point.label},
                                   {"x", point.x},
                                   {"request_throughput", point.throughput},
                                   {"latency_ms", point.latency_ms}})
               .dump() +
           "\n";
  }
  return out;
}

}  // namespace treadle
