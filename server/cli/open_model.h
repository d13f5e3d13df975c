// From a path and options to an engine that runs, with what the service must know of the model.
//
// Thread safety: call from one thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/record/recording.h"
#include "server/configuration.h"
#include "server/observe/log.h"
#include "server/serving_stack.h"
#include "server/session/served_model.h"

namespace treadle {

struct OpenedModel {
  ServedModel served;
  std::unique_ptr<Engine> engine;  // not started
  KvMemoryPlan kv;
  uint64_t weight_bytes = 0;     // packed, in memory
  int64_t max_batch_tokens = 0;  // the options', auto resolved
  bool cuda = false;             // the device
  std::string rank_backend;      // description of the first rank's
  int threads = 0;               // of all ranks on this machine together
  std::vector<FileState> files;  // that the weights were read from
  std::string notice;            // something worth telling once; or empty
  RecordedSetup setup;           // for --record, without the configuration
};

// Opens the checkpoint, packs its weights for this machine, and sizes the K/V cache. Errors say
// which file, tensor or flag, and what was expected. `progress`: fraction loaded; may be empty.
// `log`: what worker processes say.
absl::StatusOr<OpenedModel> OpenModel(const ServeOptions& options,
                                      std::function<void(double)> progress,
                                      const LogSink& log = WarningsToStderr());

SchedulingOptions SchedulingFrom(const ServeOptions& options, const OpenedModel& opened);

}  // namespace treadle
