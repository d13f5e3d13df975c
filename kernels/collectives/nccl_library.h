// NCCL, opened when it is first needed (kernels/cuda/runtime/shared_library.h): nccl_library.cc
// defines its functions under their own names and passes calls on. Thread safety: any thread.
#pragma once

#include "absl/status/status.h"

namespace treadle {

// Before any function of NCCL. FailedPrecondition: it is not installed, or of another version.
absl::Status OpenNccl();

}  // namespace treadle
