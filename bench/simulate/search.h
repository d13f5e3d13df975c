// A model served on hardware of a data sheet, and the search for the splits, weights and batch
// sizes that serve most within a target.
//
// Thread safety: stateless.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/simulate/roofline.h"
#include "bench/simulate/simulation.h"

namespace treadle {

// How a model on such a machine is served.
struct Serving {
  std::string policy = "fcfs";
  int64_t max_batch_size = kDefaultBatchSize;
  int64_t microbatch_size = 0;
  int depth = 0;  // plans in flight; 0: as engines have it
};
// Errors: Simulate's.
absl::StatusOr<SimulationResult> SimulateOn(const Roofline& machine, const Serving& serving,
                                            const std::vector<TraceEntry>& trace);

struct SearchOptions {
  RooflineOptions machine;                  // stages, ranks and weights are searched
  Serving serving;                          // the batch size is
  int64_t count = 1;                        // GPUs
  std::vector<std::string> weights = {""};  // as --weights; empty: as stored
  std::vector<int64_t> batch_sizes = {8, 32, 128, 256};
  std::map<std::string, double> goodput;  // bounds in ms, as Analyze has them
  // The trace at so many requests/s.
  std::function<std::vector<TraceEntry>(double rate)> trace;
};

struct SearchRow {
  int64_t tensor_parallel = 1, stages = 1;
  std::string weights;  // as --weights; empty: as stored
  int64_t batch_size = 0;
  // The highest at which kAttained of the requests are within the bounds, and nothing piles up.
  double rate = 0;
  double weight_bytes = 0, kv_bytes = 0;  // on the fullest GPU
  std::string bound;  // the largest term of an iteration; or why this one cannot be
};
constexpr double kAttained = 0.9;

// All splits into stages of ranks, the best first. ResourceExhausted if none fits, with the reason
// of the one that was nearest; InvalidArgument if the flags are wrong for all.
absl::StatusOr<std::vector<SearchRow>> Search(const Checkpoint& checkpoint,
                                              const SearchOptions& options);
std::string ToTable(const std::vector<SearchRow>& rows);
std::string ToJson(const std::vector<SearchRow>& rows);  // JSON lines

// The machine and the serving that a row is of. Errors: Roofline::Of's.
absl::StatusOr<Roofline> MachineOf(const Checkpoint& checkpoint, const SearchOptions& options,
                                   const SearchRow& row);
Serving ServingOf(const SearchOptions& options, const SearchRow& row);

// The best rows under loads below and above what they serve within the target: a page with a table
// and plots (html_plot.h).
absl::StatusOr<std::string> SweepPage(const Checkpoint& checkpoint, const SearchOptions& options,
                                      const std::vector<SearchRow>& rows);

}  // namespace treadle
