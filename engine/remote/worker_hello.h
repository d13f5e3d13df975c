// What a worker says of itself before it knows what its stage is. Thread safety: stateless.
#pragma once

#include <string>

#include "engine/remote/worker.h"

namespace treadle {

namespace control {
class WorkerHello;
}

// All but the state of its file and of what it has loaded. `machine`: MachineId's.
void DescribeWorker(const WorkerOptions& options, const std::string& machine,
                    control::WorkerHello& out);

}  // namespace treadle
