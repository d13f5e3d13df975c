// Training's own part of a stage: a backend, a tape, and activations for the longest slice that its
// clients asked for.
//
// Thread safety: confined to the thread of the stage's rank.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "engine/remote/worker/worker.h"
#include "training/frozen_layers.h"

namespace treadle {

namespace control {
class Configure;
class TrainHello;
}  // namespace control

// The stage that a client wants where a worker has none.
control::Configure StageFor(const control::TrainHello& hello);

// Ok if the client can train through this stage, which has ranks. Otherwise what differs, or what
// cannot be done. Any thread.
absl::Status CheckClient(const LentStage& stage, const control::TrainHello& hello);

class StageTrainer {
 public:
  // Over the layers of `model`, a CPU's, which outlives the use of this. Any thread.
  StageTrainer(const Decoder& model, const RankOptions& options)
      : model_(model), options_(options) {}

  // Has as much room, or ResourceExhausted; the room that it had stays.
  absl::Status Fit(const FrozenLayers::Room& room);
  // REQUIRES: Fit.
  FrozenLayers& layers() { return *layers_; }
  const Decoder& model() const { return model_; }

 private:
  const Decoder& model_;
  const RankOptions& options_;
  std::unique_ptr<Tape> tape_;  // made on the rank's thread, whose priority its pool gets
  std::unique_ptr<Decoder> borrowed_;
  std::unique_ptr<FrozenLayers> layers_;
  FrozenLayers::Room room_;
};

}  // namespace treadle
