// The plain twin of every op: scalar loops that read like the definition, sums in double. The oracle
// of the op-case list; slow on purpose.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace treadle {

std::unique_ptr<Backend> CreateReferenceBackend();

}  // namespace treadle
