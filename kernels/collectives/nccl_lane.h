// One communicator of NCCL, for nccl_communicator.cc: what a rank issues on it runs in that order.
//
// It is non-blocking: calls return while they are under way, and Settled says how far they are.
// NCCL must not be called by two threads at once; this sees to that. The caller's current device is
// the rank's. Thread safety: any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/sync.h"

struct ncclComm;

namespace treadle {

class NcclLane {
 public:
  static constexpr size_t kIdBytes = 128;
  // `count` ids, one after the other: what rank 0 tells the others.
  static absl::StatusOr<std::string> MakeIds(size_t count);

  NcclLane() = default;
  // Aborts what Destroy has not ended. Waits for graphs that captured it.
  ~NcclLane();
  NcclLane(const NcclLane&) = delete;
  NcclLane& operator=(const NcclLane&) = delete;

  absl::Status Begin(const std::string& id, int rank, int size);
  // calls(comm) issues something and returns NCCL's result. `what` is for errors here and below:
  // Unavailable if a peer is lost, else Internal.
  absl::Status Issue(const std::function<int(ncclComm*)>& calls, std::string_view what);
  // Whether nothing is under way any more on the host; kernels may still run.
  absl::StatusOr<bool> Settled(std::string_view what);
  // Stops what runs on the device: it comes to an end, with undefined results.
  void Revoke();
  // The end in order, of all ranks together: Destroy when this has settled.
  absl::Status Finalize();
  void Destroy();

 private:
  absl::Status Judge(int result, std::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  ncclComm* comm_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace treadle
