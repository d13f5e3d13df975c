// One communicator of NCCL and the stream that it is used on, for nccl_communicator.cc: what a rank
// issues on it runs in that order.
//
// It is non-blocking: calls return while they are under way, and Settled says how far they are.
// NCCL must not be called by two threads at once; this sees to that. The caller's current device is
// the rank's. Thread safety: any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"

struct CUstream_st;
struct ncclComm;

namespace treadle {

// The status of a call of CUDA's runtime; `error` is its cudaError_t. Internal.
absl::Status CudaStatus(int error, std::string_view call);

// Before any function of NCCL, which is opened when it is first needed. FailedPrecondition: it is
// not installed, or of another version. Any thread.
absl::Status OpenNccl();

// Pauses between two questions to NCCL or CUDA: neither wakes a host thread when work is over, for
// their own waits have no deadline and cannot be broken off.
void PauseBeforeAskingAgain();

class NcclLane {
 public:
  static constexpr size_t kIdBytes = 128;
  // The id that rank 0 tells the others.
  static absl::StatusOr<std::string> MakeId();

  NcclLane() = default;
  // Aborts what Destroy has not ended. Waits for graphs that captured it. Drain has returned.
  ~NcclLane();
  NcclLane(const NcclLane&) = delete;
  NcclLane& operator=(const NcclLane&) = delete;

  // On the device's stream, or, given none, on one of its own.
  absl::Status Begin(const std::string& id, int rank, int size, CUstream_st* of_device);
  CUstream_st* stream() const { return stream_; }
  // calls(comm) issues something and returns NCCL's result. `what` is for errors here and below:
  // Aborted after Revoke, Unavailable if a peer is lost, else Internal.
  absl::Status Issue(const std::function<int(ncclComm*)>& calls, std::string_view what);
  // Whether nothing is under way any more on the host; kernels may still run.
  absl::StatusOr<bool> Settled(std::string_view what);
  // Stops what runs on the device: it comes to an end, with undefined results.
  void Revoke();
  // The end in order, of all ranks together: Destroy when this has settled.
  absl::Status Finalize();
  void Destroy();
  // Waits until the stream is empty, or until the deadline. Its own stream ends here.
  void Drain(std::chrono::steady_clock::time_point deadline);

 private:
  absl::Status Judge(int result, std::string_view what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Set by Begin.
  CUstream_st* stream_ = nullptr;
  bool own_stream_ = false;

  Mutex mu_;
  ncclComm* comm_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool revoked_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace treadle
