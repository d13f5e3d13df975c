// From a path and options to an engine that runs, with what the service must know of the model.
//
// Thread safety: call from one thread.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/record/recording.h"
#include "models/checkpoints/checkpoint.h"
#include "scheduler/speculation/draft_model.h"
#include "server/cli/rank_devices.h"
#include "server/configuration.h"
#include "server/observe/log.h"
#include "server/serving_stack.h"
#include "server/session/served_model.h"

namespace treadle {

struct OpenedModel {
  ServedModel served;
  std::unique_ptr<Engine> engine;     // not started
  std::unique_ptr<DraftModel> draft;  // null: there is none
  KvMemoryPlan kv;
  uint64_t weight_bytes = 0;     // packed, in memory
  int64_t max_batch_tokens = 0;  // the options', auto resolved
  bool cuda = false;             // the device
  std::string rank_backend;      // description of the first rank's
  int threads = 0;               // of all ranks on this machine together
  std::string notice;            // something worth telling once; or empty
  std::string numerics_key;      // all that decides the bits of an answer
  RecordedSetup setup;           // for --record, without the configuration

  void AddNotice(const std::string& more) {
    if (!more.empty()) notice += (notice.empty() ? "" : "; ") + more;
  }
};

// A checkpoint and options that go together, on this machine; nothing is loaded yet.
struct CheckedModel {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Checkpoint> draft;  // null: no draft model
  RankDevices devices;
  ServeOptions options;  // max_batch_tokens and max_context resolved
  std::optional<SamplingParameters> sampling_defaults;
};

// All that can be found wrong with a model and its flags before it is loaded. Errors say which
// file, tensor or flag, and what was expected.
absl::StatusOr<CheckedModel> CheckModel(const ServeOptions& options);

// Packs a checked model's weights for this machine, and sizes the K/V cache. Errors as
// CheckModel's. `progress`: fraction loaded; may be empty. `log`: what worker processes say.
absl::StatusOr<OpenedModel> OpenModel(const CheckedModel& checked,
                                      std::function<void(double)> progress,
                                      const LogSink& log = WarningsToStderr());
// The step of it that makes the engine, its K/V cache and the workers that it owns: places layers,
// starts workers where none are given, and loads. Fills in what `opened` says of these.
absl::Status OpenEngine(const CheckedModel& checked, std::function<void(double)> progress,
                        const LogSink& log, OpenedModel& opened);
// Checks and opens the model of `options`, and shows on stderr how far it is.
absl::StatusOr<OpenedModel> OpenModel(const ServeOptions& options);

// With the default batch sizes where the options say auto.
SchedulingOptions SchedulingFrom(const ServeOptions& options, const OpenedModel& opened);
// Adds that iterations are measured at start, and sizes that are auto chosen by that.
void ChooseBatchAtStart(const ServeOptions& options, const OpenedModel& opened,
                        SchedulingOptions& scheduling);

}  // namespace treadle
