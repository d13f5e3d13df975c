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
#include "models/checkpoints/checkpoint.h"
#include "server/cli/rank_devices.h"
#include "server/configuration.h"
#include "server/observe/log_event.h"

namespace treadle {

struct OpenedWorkers {
  std::unique_ptr<Engine> engine;  // not started; owns the workers that were started for it
  int64_t kv_pages = 0;            // of the tightest stage
  uint64_t weight_bytes = 0;       // of all stages and ranks
  std::string backend;             // description
  std::string placement;           // a line for the log: "stage 0: layers 0-14; ..."
};

// Who is told what happens.
struct LoadListeners {
  std::function<void(double)> progress;  // fraction loaded, from any thread; may be empty
  LogSink log;                           // what workers of this machine say
};

// Requires options.remote(). Errors say which flag, layer or worker.
absl::StatusOr<OpenedWorkers> OpenWorkers(std::shared_ptr<const Checkpoint> checkpoint,
                                          const ServeOptions& options, const RankDevices& devices,
                                          int64_t max_context, LoadListeners listeners);

}  // namespace treadle
