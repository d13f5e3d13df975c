// Events of a device that are used again and again, for nccl_communicator.cc. The caller's current
// device is theirs. Thread safety: one thread.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

struct CUevent_st;

namespace treadle {

class CudaEvents {
 public:
  CudaEvents() = default;
  ~CudaEvents();
  CudaEvents(const CudaEvents&) = delete;
  CudaEvents& operator=(const CudaEvents&) = delete;

  // Without timing.
  absl::StatusOr<CUevent_st*> Take();
  // Every event comes back before this ends.
  void Return(CUevent_st* event) { free_.push_back(event); }

 private:
  std::vector<CUevent_st*> free_;
};

}  // namespace treadle
