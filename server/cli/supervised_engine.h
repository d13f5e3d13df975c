// An engine whose workers this process started: those that do not come back by themselves are
// replaced.
//
// A worker that dies is started again by its supervisor, and the engine's next epoch finds it. One
// that hangs stays where it is, and the next epoch does not come to stand. Then all workers are
// killed, so that the supervisor starts others: each waits for the others in an epoch, and which of
// them is to blame cannot be told from outside.
//
// Thread safety: as Engine.
#pragma once

#include <memory>

#include "engine/engine.h"
#include "server/cli/worker_supervisor.h"

namespace treadle {

// `engine` attaches to the supervisor's workers.
std::unique_ptr<Engine> MakeSupervisedEngine(std::unique_ptr<WorkerSupervisor> workers,
                                             std::unique_ptr<Engine> engine);

}  // namespace treadle
