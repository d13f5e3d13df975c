#include "bench/simulate/search.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "bench/load/load_report.h"

namespace treadle {
namespace {

std::string NameOf(const SearchRow& row) { return row.weights.empty() ? "as stored" : row.weights; }

// Whether enough requests are within the bounds, and are answered as fast as they come.
absl::StatusOr<bool> Attains(const Roofline& machine, const Serving& serving,
                             const SearchOptions& options, double rate) {
  TREADLE_ASSIGN_OR_RETURN(const SimulationResult result,
                           SimulateOn(machine, serving, options.trace(rate)));
  const LoadReport report = Analyze(result.load, {.goodput = options.goodput});
  // From the first arrival to the last one, about.
  std::vector<double> latencies = report.samples_ms.at("e2el");
  std::ranges::sort(latencies);
  const double arrivals = report.duration - 1e-3 * Percentile(latencies, 10);
  return static_cast<double>(report.completed) >= kAttained * rate * arrivals &&
         static_cast<double>(report.good) >=
             kAttained * static_cast<double>(result.load.requests.size());
}

// Doubles and halves, then bisects: to about 3 %.
absl::StatusOr<double> HighestRate(const Roofline& machine, const Serving& serving,
                                   const SearchOptions& options) {
  constexpr double kLeast = 1.0 / 1024, kMax = 65536;
  double low = 1;
  TREADLE_ASSIGN_OR_RETURN(const bool begins, Attains(machine, serving, options, low));
  for (double next = low; next >= kLeast && next <= kMax;) {
    next = begins ? 2 * low : low / 2;
    TREADLE_ASSIGN_OR_RETURN(const bool attains, Attains(machine, serving, options, next));
    if (attains != begins) {
      if (attains) low = next;
      break;
    }
    low = next;
  }
  if (low < kLeast) return 0;
  double high = 2 * low;
  for (int i = 0; i < 5; ++i) {
    const double middle = (low + high) / 2;
    TREADLE_ASSIGN_OR_RETURN(const bool attains, Attains(machine, serving, options, middle));
    (attains ? low : high) = middle;
  }
  return low;
}

}  // namespace

absl::StatusOr<SimulationResult> SimulateOn(const Roofline& machine, const Serving& serving,
                                            const std::vector<TraceEntry>& trace) {
  const RooflineOptions& split = machine.options();
  const auto stages = static_cast<int>(split.stages);
  SimulationOptions options;
  options.policy = serving.policy;
  options.limits = {.max_batch_size = serving.max_batch_size,
                    .max_batch_tokens = split.max_batch_tokens,
                    .stages = stages,
                    .depth = serving.depth > 0 ? serving.depth : std::max(stages, 2),
                    .max_context = machine.max_context(),
                    .microbatch_size = serving.microbatch_size};
  options.paging = machine.kv().paging;
  options.pages = machine.kv().pages;
  options.hop = split.efficiency.hop;
  options.seconds = [&machine](const IterationPlan& plan, int64_t padding, int stage) {
    return machine.Seconds(plan, padding, stage);
  };
  return Simulate(trace, options);
}

absl::StatusOr<Roofline> MachineOf(const Checkpoint& checkpoint, const SearchOptions& options,
                                   const SearchRow& row) {
  RooflineOptions split = options.machine;
  split.tensor_parallel = row.tensor_parallel;
  split.stages = row.stages;
  split.max_batch_tokens = std::max(split.max_batch_tokens, 2 * row.batch_size);
  TREADLE_ASSIGN_OR_RETURN(split.weights, WeightPlan::Parse(row.weights));
  return Roofline::Of(checkpoint, split);
}

Serving ServingOf(const SearchOptions& options, const SearchRow& row) {
  Serving serving = options.serving;
  serving.max_batch_size = row.batch_size;
  return serving;
}

absl::StatusOr<std::vector<SearchRow>> Search(const Checkpoint& checkpoint,
                                              const SearchOptions& options) {
  std::vector<SearchRow> rows;
  absl::Status refusal = InvalidArgument("--count is ", options.count, ", expected at least 1");
  for (int64_t ranks = 1; ranks <= options.count; ++ranks) {
    if (options.count % ranks != 0 || ranks > options.machine.hardware.per_host) {
      continue;
    }
    for (const std::string& weights : options.weights) {
      for (const int64_t size : options.batch_sizes) {
        SearchRow row{.tensor_parallel = ranks,
                      .stages = options.count / ranks,
                      .weights = weights,
                      .batch_size = size};
        TREADLE_ASSIGN_OR_RETURN(const WeightPlan plan, WeightPlan::Parse(weights));
        TREADLE_RETURN_IF_ERROR(plan.CheckAgainst(checkpoint));
        const auto machine = MachineOf(checkpoint, options, row);
        if (!machine.ok()) {
          if (!absl::IsResourceExhausted(refusal)) refusal = machine.status();
          break;  // for all batch sizes
        }
        row.weight_bytes = machine->weight_bytes();
        row.kv_bytes = machine->kv_bytes();
        row.bound = machine->Bound(size, 512);
        TREADLE_ASSIGN_OR_RETURN(row.rate, HighestRate(*machine, ServingOf(options, row), options));
        rows.push_back(std::move(row));
      }
    }
  }
  if (rows.empty()) return refusal;
  std::ranges::stable_sort(rows, std::greater<>(), &SearchRow::rate);
  return rows;
}

std::string ToTable(const std::vector<SearchRow>& rows) {
  std::string out =
      "  TP   PP  weights        batch  requests/s  GB of weights  of K/V  most of an iteration\n";
  for (const SearchRow& row : rows) {
    absl::StrAppendFormat(&out, "%4d %4d  %-14s %5d %11.2f %14.1f %7.1f  %s\n", row.tensor_parallel,
                          row.stages, NameOf(row), row.batch_size, row.rate,
                          row.weight_bytes * 1e-9, row.kv_bytes * 1e-9, row.bound);
  }
  return out;
}

std::string ToJson(const std::vector<SearchRow>& rows) {
  std::string out;
  for (const SearchRow& row : rows) {
    out += nlohmann::ordered_json({{"tensor_parallel", row.tensor_parallel},
                                   {"pipeline_parallel", row.stages},
                                   {"weights", NameOf(row)},
                                   {"max_batch_size", row.batch_size},
                                   {"request_rate", row.rate},
                                   {"weight_bytes", row.weight_bytes},
                                   {"kv_bytes", row.kv_bytes},
                                   {"bound", row.bound}})
               .dump() +
           "\n";
  }
  return out;
}

}  // namespace treadle
