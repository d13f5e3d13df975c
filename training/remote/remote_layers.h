// The client's side of training through workers (training_guest.h): the layers of a model, spread
// over workers, for a Trainer.
//
// A worker that has a stage, for its master or for other clients, keeps it and runs those layers;
// the others share out what is left and load it. Calls go to one worker after the other. A worker
// that is lost costs the step: it runs again, with the same bits, once the worker or its successor
// at that address is back.
//
// Thread safety: confined to one thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/remote/control_streams.h"
#include "training/frozen_layers.h"

namespace treadle {

struct RemoteLayersOptions {
  std::vector<std::string> workers;  // addresses, in the order of the layers
  ControlCredentials credentials;
  std::string version;  // empty: this program's
  std::string fingerprint;
  std::string weights;  // WeightPlan::text
  int64_t layers = 0, hidden = 0;
  LoraOptions lora;
  int64_t max_sequences = 0, max_length = 0;  // of a batch
  // A worker that works says so every second; after so long without a word it is lost.
  std::chrono::milliseconds silence{30'000};
  std::chrono::milliseconds patience{60'000};  // for a worker to be there, or back
  std::function<void(std::string)> log =
      {};  // a line for a worker that is lost, or waited for; may be empty
};

// The layers of each worker, of `layers`, given those that it has (empty: none yet).
// FailedPrecondition if they leave a gap or overlap.
absl::StatusOr<std::vector<LayerRange>> DivideLayers(std::span<const LayerRange> have,
                                                     int64_t layers);

// Finds the workers and their layers. `adapter`, of all layers, outlives it. Errors name the
// worker: DeadlineExceeded if it is not there in time; what it refuses, by its own reason.
absl::StatusOr<std::unique_ptr<Layers>> ConnectLayers(const RemoteLayersOptions& options,
                                                      TrainedAdapter& adapter);

}  // namespace treadle
