// GradientOps on the vectors and the threads of a CPU backend. Contracts: gradient_ops.h.
#pragma once

#include <memory>

#include "kernels/cpu/ops/cpu_ops.h"
#include "training/ops/gradient_ops.h"

namespace treadle {

// The ops run on the threads of `backend`, which outlives them.
std::unique_ptr<GradientOps> CreateCpuGradients(CpuOps& backend);

}  // namespace treadle
