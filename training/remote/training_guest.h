// The worker's side of training through its layers (Borzunov et al. 2023, "Distributed Inference
// and Fine-tuning of Large Language Models Over The Internet", section 3.3): runs them forward and
// back for clients, who own all that is learnt, and never writes to a weight.
//
// A client's call runs on the thread of the stage's rank, a layer of some sequences at a time
// (FrozenLayers::Slice), while no plan waits there (StageRanks::AddBackground): a plan waits for
// one such slice at most, a stage that serves gives training a tenth of its time, and clients take
// turns. That thread is also what makes it safe: a slice and an iteration never run at once. Slices
// have a backend of their own, with its threads and scratch, and activations of their own
// (Decoder::Borrow); with the stage they share packed weights and tables, which nobody writes to.
// A client's call computes the same whatever other clients do.
//
// The stage is a master's, or one that was loaded for clients where there is no master. It is a
// master's to take away: StageRanks drops the slices that are left and waits for the one that runs,
// and clients get Unavailable.
//
// Thread safety: StageGuest's.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/remote/worker/worker.h"

namespace treadle {

// For WorkerOptions::guest. `log` as WorkerOptions::log.
std::unique_ptr<StageGuest> CreateTrainingGuest(StageLender& lender,
                                                std::function<void(std::string)> log);

}  // namespace treadle
