// From a checkpoint and options to an engine in worker processes: placement, workers of this
// machine where none are given, attachment and loading.
//
// Thread safety: call from one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "models/checkpoint.h"
#include "server/configuration.h"

namespace treadle {

struct OpenedWorkers {
  std::unique_ptr<Engine> engine;  // not started; owns the workers that were started for it
  int64_t kv_pages = 0;            // of the tightest stage
  uint64_t weight_bytes = 0;       // of all stages and ranks
  std::string backend;             // description
  std::string placement;           // a line for the log: "stage 0: layers 0-14; ..."
};

// Requires options.remote(). Errors say which flag, layer or worker. `progress`: fraction loaded,
// from any thread; may be empty.
absl::StatusOr<OpenedWorkers> OpenWorkers(std::shared_ptr<const Checkpoint> checkpoint,
                                          const ServeOptions& options, int64_t max_context,
                                          std::function<void(double)> progress);

}  // namespace treadle
