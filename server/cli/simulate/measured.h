// treadle simulate --calibrate: this machine instead of a data sheet.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "bench/simulate/simulation.h"
#include "models/checkpoints/checkpoint.h"
#include "server/configuration.h"

namespace treadle {

struct MeasuredMachine {
  SimulationOptions simulation;  // limits, cache and times of an iteration
  std::string text;              // what was measured, for the report
};

// Loads the model as `serve` says, runs iterations as a server does at its start
// (scheduler/cost/calibration.h), but for some seconds, and fits their cost. Errors: OpenModel's.
absl::StatusOr<MeasuredMachine> MeasureHere(const ServeOptions& serve);

// By what a server's iterations took (bench/simulate/recorded_cost.h), with a cache for
// max_batch_size requests. Headers of the model are read only. Errors: RecordedCost::Read's.
absl::StatusOr<MeasuredMachine> MeasuredBy(const std::string& ledger, const ServeOptions& serve,
                                           const Checkpoint& checkpoint, uint64_t seed);

}  // namespace treadle
