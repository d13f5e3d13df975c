// GradientOps in plain loops of doubles: what the fast ones are compared with. Contracts:
// gradient_ops.h.
#pragma once

#include <memory>

#include "training/ops/gradient_ops.h"

namespace treadle {

// `backend` decodes weights; it outlives the ops.
std::unique_ptr<GradientOps> CreateReferenceGradients(Backend& backend);

}  // namespace treadle
