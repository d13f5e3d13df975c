// The plain twin of every op: scalar loops that read like the definition, sums in double. The oracle
// of the op-case list; slow on purpose.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace treadle {

// kInt8 quantizes activations by the rule of ComputeMode and then sums in double; kAuto is kExact.
std::unique_ptr<Backend> CreateReferenceBackend(ComputeMode compute = ComputeMode::kExact);

}  // namespace treadle
