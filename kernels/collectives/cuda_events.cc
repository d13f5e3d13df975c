#include "kernels/collectives/cuda_events.h"

#include <cuda_runtime.h>

#include "base/status.h"
#include "kernels/collectives/nccl_lane.h"

namespace treadle {

CudaEvents::~CudaEvents() {
  for (const cudaEvent_t event : free_) cudaEventDestroy(event);
}

absl::StatusOr<CUevent_st*> CudaEvents::Take() {
  cudaEvent_t event = nullptr;
  if (free_.empty()) {
    TREADLE_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
  } else {
    event = free_.back();
    free_.pop_back();
  }
  return event;
}

}  // namespace treadle
