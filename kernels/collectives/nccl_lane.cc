#include "kernels/collectives/nccl_lane.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstring>
#include <thread>
#include <utility>

#include "base/status.h"

namespace treadle {

void PauseBeforeAskingAgain() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

absl::Status CudaStatus(int error, std::string_view call) {
  const auto result = static_cast<cudaError_t>(error);
  if (result == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return Internal(call, ": ", cudaGetErrorString(result), " (", cudaGetErrorName(result), ")");
}

static_assert(NcclLane::kIdBytes == sizeof(ncclUniqueId));

absl::StatusOr<std::string> NcclLane::MakeId() {
  ncclUniqueId id;
  if (const ncclResult_t result = ncclGetUniqueId(&id); result != ncclSuccess) {
    return Internal("ncclGetUniqueId: ", ncclGetErrorString(result));
  }
  return std::string(id.internal, sizeof(id.internal));
}

NcclLane::~NcclLane() {
  MutexLock lock(mu_);
  if (comm_ != nullptr) ncclCommAbort(comm_);
}

absl::Status NcclLane::Begin(const std::string& id, int rank, int size, CUstream_st* of_device) {
  TREADLE_CHECK(id.size() == kIdBytes && stream_ == nullptr);
  own_stream_ = of_device == nullptr;
  stream_ = of_device;
  if (own_stream_) {
    TREADLE_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"));
  }
  ncclUniqueId unique;
  std::memcpy(unique.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  MutexLock lock(mu_);
  return Judge(ncclCommInitRankConfig(&comm_, size, unique, rank, &config),
               "ncclCommInitRankConfig");
}

absl::Status NcclLane::Issue(const std::function<int(ncclComm*)>& calls, std::string_view what) {
  MutexLock lock(mu_);
  if (revoked_) return absl::AbortedError(Str(what, ": the communicator is broken"));
  return Judge(calls(comm_), what);
}

absl::StatusOr<bool> NcclLane::Settled(std::string_view what) {
  MutexLock lock(mu_);
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
  TREADLE_RETURN_IF_ERROR(Judge(asked != ncclSuccess ? asked : state, what));
  return state == ncclSuccess;
}

void NcclLane::Revoke() {
  MutexLock lock(mu_);
  if (comm_ != nullptr && !std::exchange(revoked_, true)) {
    ncclCommRevoke(comm_, NCCL_REVOKE_DEFAULT);
  }
}

absl::Status NcclLane::Finalize() {
  return Issue([](ncclComm* comm) { return ncclCommFinalize(comm); }, "ncclCommFinalize");
}

void NcclLane::Destroy() {
  MutexLock lock(mu_);
  ncclCommDestroy(std::exchange(comm_, nullptr));
}

void NcclLane::Drain(std::chrono::steady_clock::time_point deadline) {
  if (stream_ == nullptr) return;
  while (cudaStreamQuery(stream_) == cudaErrorNotReady &&
         std::chrono::steady_clock::now() < deadline) {
    PauseBeforeAskingAgain();
  }
  if (own_stream_) cudaStreamDestroy(stream_);
  stream_ = nullptr;
}

absl::Status NcclLane::Judge(int result, std::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  const char* detail = comm_ == nullptr ? nullptr : ncclGetLastError(comm_);
  const std::string text = Str(what, ": ", ncclGetErrorString(static_cast<ncclResult_t>(result)),
                               ": ", detail == nullptr || *detail == '\0' ? "no details" : detail);
  return result == ncclRemoteError ? absl::UnavailableError(text) : Internal(text);
}

}  // namespace treadle
