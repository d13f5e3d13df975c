#include "kernels/collectives/nccl_communicator.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/collectives/nccl_lane.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/runtime/backend_on_device.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

// A wait asks all the time at first, then with pauses.
constexpr auto kSpin = std::chrono::microseconds(200);
// The time for what was broken off to stop, and for an orderly end.
constexpr auto kEnd = std::chrono::seconds(5);

// Numbers behind the parts, for the first exchange: sent, summed, received.
constexpr int kSpare = 3;

// Events of the device that are used again and again, without timing.
class CudaEvents {
 public:
  CudaEvents() = default;
  ~CudaEvents() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
  }
  CudaEvents(const CudaEvents&) = delete;
  CudaEvents& operator=(const CudaEvents&) = delete;

  absl::StatusOr<cudaEvent_t> Take() {
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
  // Every event comes back before this ends.
  void Return(cudaEvent_t event) { free_.push_back(event); }

 private:
  std::vector<cudaEvent_t> free_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const NcclOptions& options, cuda::Device& device)
      : options_(options), device_(device) {}
  ~NcclCommunicator() override;

  absl::Status Connect(Rendezvous& rendezvous);

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  bool asynchronous() const override { return true; }
  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override;
  absl::Status AllGather(const void* in, size_t bytes, void* out) override;
  absl::Status Broadcast(void* data, size_t bytes, int root) override;
  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override;
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override;
  absl::Status Wait(Transfer transfer) override;
  void Abort(absl::Status why) override;

 private:
  struct Pending {
    int peer = 0;
    bool send = false;
    bool posted = false;
    void* data = nullptr;  // const for a send
    size_t bytes = 0;
    cudaEvent_t begun = nullptr;  // on the device's stream, when the transfer was begun
    cudaEvent_t done = nullptr;   // on the transfers' stream
  };

  // The first reason stays. Returns it.
  absl::Status Break(absl::Status why);
  absl::Status Checked(absl::Status status) { return status.ok() ? status : Break(status); }
  absl::Status broken() {
    MutexLock lock(mu_);
    return broken_;
  }

  // Until ready(), which returns a StatusOr<bool>; `what` is for the error.
  template <typename Ready>
  absl::Status WaitUntil(Clock::time_point deadline, Ready ready, std::string_view what);
  // Issues calls and waits until NCCL has them on their stream.
  template <typename Calls>
  absl::Status Issue(Calls calls, std::string_view what);
  absl::Status WaitForEvent(cudaEvent_t event, std::string_view what);
  // Device::WatchWaits.
  absl::Status LookWhileWaiting(double seconds);

  absl::StatusOr<std::string> ExchangeId(Rendezvous& rendezvous);
  absl::Status Form(Rendezvous& rendezvous);
  absl::Status RunOnce();
  absl::StatusOr<Transfer> BeginTransfer(Pending pending);
  absl::Status Post(Pending& pending);

  cudaStream_t stream() { return static_cast<cudaStream_t>(device_.stream()); }
  Clock::time_point Deadline() const {
    return connected_ ? Clock::now() + options_.timeout : connect_deadline_;
  }

  // Constant after Connect.
  const NcclOptions options_;
  cuda::Device& device_;
  int64_t parts_count_ = 0;
  Buffer parts_;   // [size][max_count] f32 of AllReduce, and kSpare
  NcclLane lane_;  // behind parts_: what reads and writes those ends first

  Mutex mu_;
  absl::Status broken_ ABSL_GUARDED_BY(mu_);

  // Confined to the rank's thread.
  bool connected_ = false;
  Rendezvous* forming_ = nullptr;  // until connected
  Clock::time_point connect_deadline_;
  Transfer next_transfer_ = 1;
  std::map<Transfer, Pending> pending_;  // in the order in which they were begun
  CudaEvents events_;                    // those of pending_ and free ones
};

absl::Status NcclCommunicator::Break(absl::Status why) {
  {
    MutexLock lock(mu_);
    if (!broken_.ok()) return broken_;
    broken_ = why;
  }
  lane_.Revoke();
  return why;
}

void NcclCommunicator::Abort(absl::Status why) {
  int device = 0;
  cudaGetDevice(&device);  // the caller may be another rank's thread
  cudaSetDevice(device_.properties().ordinal);
  Break(std::move(why)).IgnoreError();
  cudaSetDevice(device);
}

template <typename Ready>
absl::Status NcclCommunicator::WaitUntil(Clock::time_point deadline, Ready ready,
                                         std::string_view what) {
  const Clock::time_point begin = Clock::now();
  for (;;) {
    TREADLE_RETURN_IF_ERROR(broken());
    if (forming_ != nullptr) TREADLE_RETURN_IF_ERROR(Checked(forming_->status()));
    const absl::StatusOr<bool> now_ready = ready();
    if (!now_ready.ok()) return Break(now_ready.status());
    if (*now_ready) return absl::OkStatus();
    const Clock::time_point now = Clock::now();
    if (now > deadline) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - begin);
      return Break(absl::DeadlineExceededError(
          Str("rank ", rank(), " waited ", waited.count(), " ms for ", what)));
    }
    if (now > begin + kSpin) PauseBeforeAskingAgain();
  }
}

template <typename Calls>
absl::Status NcclCommunicator::Issue(Calls calls, std::string_view what) {
  TREADLE_RETURN_IF_ERROR(broken());
  TREADLE_RETURN_IF_ERROR(Checked(lane_.Issue(calls, what)));
  return WaitUntil(
      Deadline(), [&] { return lane_.Settled(what); }, what);
}

absl::Status NcclCommunicator::WaitForEvent(cudaEvent_t event, std::string_view what) {
  const auto passed = [&]() -> absl::StatusOr<bool> {
    TREADLE_RETURN_IF_ERROR(lane_.Settled(what).status());
    const cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) return false;
    TREADLE_RETURN_IF_ERROR(CudaStatus(error, what));
    return true;
  };
  return WaitUntil(Deadline(), passed, what);
}

absl::Status NcclCommunicator::LookWhileWaiting(double seconds) {
  TREADLE_RETURN_IF_ERROR(broken());
  if (std::isinf(seconds)) {
    return Break(absl::AbortedError("another communicator of this device is broken"));
  }
  if (seconds * 1e3 > static_cast<double>(options_.timeout.count())) {
    return Break(absl::DeadlineExceededError(
        Str("rank ", rank(), " waited ", options_.timeout.count(), " ms for its device")));
  }
  return Checked(lane_.Settled("waiting for the device").status());
}

// -- forming --------------------------------------------------------------------------------------

absl::StatusOr<std::string> NcclCommunicator::ExchangeId(Rendezvous& rendezvous) {
  static constexpr char kKey[] = "nccl";
  if (rank() == 0) {
    TREADLE_ASSIGN_OR_RETURN(const std::string id, NcclLane::MakeId());
    TREADLE_RETURN_IF_ERROR(rendezvous.Set(kKey, id));
    return id;
  }
  TREADLE_ASSIGN_OR_RETURN(const std::string id, rendezvous.Get(kKey, connect_deadline_));
  if (id.size() != NcclLane::kIdBytes) {
    return InvalidArgument("rank 0 gave ", id.size(), " bytes of an NCCL id, expected ",
                           NcclLane::kIdBytes);
  }
  return id;
}

absl::Status NcclCommunicator::Connect(Rendezvous& rendezvous) {
  connect_deadline_ = Clock::now() + options_.connect_timeout;
  device_.BindThread();
  if (!options_.link) parts_count_ = size() * options_.max_count;
  TREADLE_ASSIGN_OR_RETURN(parts_, device_.Allocate((parts_count_ + kSpare) * sizeof(float)));
  forming_ = &rendezvous;
  TREADLE_RETURN_IF_ERROR(Form(rendezvous));
  TREADLE_RETURN_IF_ERROR(RunOnce());
  forming_ = nullptr;
  connected_ = true;
  // Collectives: the device waits for them by itself.
  if (!options_.link) {
    device_.WatchWaits(this, [this](double seconds) { return LookWhileWaiting(seconds); });
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Form(Rendezvous& rendezvous) {
  TREADLE_ASSIGN_OR_RETURN(const std::string id, ExchangeId(rendezvous));
  TREADLE_RETURN_IF_ERROR(lane_.Begin(id, rank(), size(), options_.link ? nullptr : stream()));
  const auto formed = [&] { return lane_.Settled("forming an NCCL communicator"); };
  return WaitUntil(connect_deadline_, formed, "all ranks to form an NCCL communicator");
}

// Makes the connections and loads the kernels of what will be used: later, a first time could have
// to wait for a collective that waits for it.
absl::Status NcclCommunicator::RunOnce() {
  float* const spare = reinterpret_cast<float*>(parts_.data()) + parts_count_;
  if (options_.link) {
    const auto exchange = [&](ncclComm_t comm) {
      ncclGroupStart();
      if (rank() + 1 < size()) ncclSend(spare, 1, ncclInt8, rank() + 1, comm, lane_.stream());
      if (rank() > 0) ncclRecv(spare + 2, 1, ncclInt8, rank() - 1, comm, lane_.stream());
      return ncclGroupEnd();
    };
    TREADLE_RETURN_IF_ERROR(Issue(exchange, "the first transfer"));
  } else {
    TREADLE_RETURN_IF_ERROR(AllReduce(spare, 1, /*accumulate=*/false, spare + 1));
  }
  TREADLE_ASSIGN_OR_RETURN(const cudaEvent_t event, events_.Take());
  events_.Return(event);  // it is free again when this returns
  TREADLE_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event, lane_.stream()), "cudaEventRecord"));
  TREADLE_RETURN_IF_ERROR(WaitForEvent(event, "the first exchange between all ranks"));
  return device_.status();
}

NcclCommunicator::~NcclCommunicator() {
  device_.BindThread();
  device_.WatchWaits(this, nullptr);
  // An end in order takes all ranks; where one is missing, or something broke, what runs is broken
  // off, and the lane's destructor aborts.
  const Clock::time_point deadline =
      Clock::now() + std::min<Clock::duration>(options_.timeout, kEnd);
  const auto settled = [&] { return lane_.Settled("ending"); };
  if (connected_ && broken().ok() && Checked(lane_.Finalize()).ok() &&
      WaitUntil(deadline, settled, "all ranks to end").ok()) {
    lane_.Destroy();
  }
  lane_.Drain(Clock::now() + kEnd);
  for (const auto& [transfer, pending] : pending_) {
    events_.Return(pending.begun);
    events_.Return(pending.done);
  }
}

// -- collectives ----------------------------------------------------------------------------------

absl::Status NcclCommunicator::AllReduce(const float* in, int64_t count, bool accumulate,
                                         float* out) {
  auto* parts = reinterpret_cast<float*>(parts_.data());
  for (int64_t first = 0; first < count; first += options_.max_count) {
    const int64_t piece = std::min(options_.max_count, count - first);
    TREADLE_RETURN_IF_ERROR(
        AllGather(in + first, static_cast<size_t>(piece) * sizeof(float), parts));
    cuda::RankSum(device_, parts, size(), piece, accumulate, out + first);
  }
  return Checked(device_.status());
}

absl::Status NcclCommunicator::AllGather(const void* in, size_t bytes, void* out) {
  TREADLE_CHECK(!options_.link);
  const auto gather = [&](ncclComm_t comm) {
    return ncclAllGather(in, out, bytes, ncclInt8, comm, stream());
  };
  return Issue(gather, "ncclAllGather");
}

absl::Status NcclCommunicator::Broadcast(void* data, size_t bytes, int root) {
  TREADLE_CHECK(!options_.link);
  const auto broadcast = [&](ncclComm_t comm) {
    return ncclBroadcast(data, data, bytes, ncclInt8, root, comm, stream());
  };
  return Issue(broadcast, "ncclBroadcast");
}

// -- transfers ------------------------------------------------------------------------------------

absl::StatusOr<Communicator::Transfer> NcclCommunicator::BeginTransfer(Pending pending) {
  TREADLE_CHECK(options_.link && !device_.capturing());
  TREADLE_CHECK(pending.send ? pending.peer > rank() : pending.peer < rank());
  TREADLE_RETURN_IF_ERROR(broken());
  TREADLE_ASSIGN_OR_RETURN(pending.begun, events_.Take());
  TREADLE_ASSIGN_OR_RETURN(pending.done, events_.Take());
  const Transfer transfer = next_transfer_++;
  Pending& begun = pending_.emplace(transfer, pending).first->second;
  TREADLE_RETURN_IF_ERROR(
      Checked(CudaStatus(cudaEventRecord(begun.begun, stream()), "cudaEventRecord")));
  if (begun.send) TREADLE_RETURN_IF_ERROR(Post(begun));
  return transfer;
}

absl::StatusOr<Communicator::Transfer> NcclCommunicator::Send(const void* data, size_t bytes,
                                                              int to) {
  return BeginTransfer({.peer = to, .send = true, .data = const_cast<void*>(data), .bytes = bytes});
}

absl::StatusOr<Communicator::Transfer> NcclCommunicator::Recv(void* data, size_t bytes, int from) {
  return BeginTransfer({.peer = from, .data = data, .bytes = bytes});
}

absl::Status NcclCommunicator::Post(Pending& pending) {
  const cudaStream_t stream = lane_.stream();
  TREADLE_RETURN_IF_ERROR(
      Checked(CudaStatus(cudaStreamWaitEvent(stream, pending.begun, 0), "cudaStreamWaitEvent")));
  const auto post = [&](ncclComm_t comm) {
    return pending.send
               ? ncclSend(pending.data, pending.bytes, ncclInt8, pending.peer, comm, stream)
               : ncclRecv(pending.data, pending.bytes, ncclInt8, pending.peer, comm, stream);
  };
  TREADLE_RETURN_IF_ERROR(Issue(post, pending.send ? "ncclSend" : "ncclRecv"));
  pending.posted = true;
  return Checked(CudaStatus(cudaEventRecord(pending.done, stream), "cudaEventRecord"));
}

absl::Status NcclCommunicator::Wait(Transfer transfer) {
  TREADLE_RETURN_IF_ERROR(broken());
  const auto it = pending_.find(transfer);
  TREADLE_CHECK(it != pending_.end());
  Pending& waited = it->second;
  // Receives from one peer match its sends by order, so those that were begun earlier come first.
  for (auto earlier = pending_.begin(); !waited.posted; ++earlier) {
    Pending& pending = earlier->second;
    if (!pending.posted && pending.peer == waited.peer && !pending.send) {
      TREADLE_RETURN_IF_ERROR(Post(pending));
    }
  }
  TREADLE_RETURN_IF_ERROR(WaitForEvent(
      waited.done, Str(waited.send ? "a send to rank " : "a message from rank ", waited.peer)));
  events_.Return(waited.begun);
  events_.Return(waited.done);
  pending_.erase(it);
  return absl::OkStatus();
}

}  // namespace

void LoadKernelsEagerly() { setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0); }

absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const NcclOptions& options,
                                                                     cuda::Device& device,
                                                                     Rendezvous& rendezvous) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size ||
      options.max_count < 1) {
    return InvalidArgument("rank ", options.rank, " of ", options.size, " with pieces of ",
                           options.max_count, ": expected a rank below the size, and at least 1");
  }
  auto communicator = std::make_unique<NcclCommunicator>(options, device);
  TREADLE_RETURN_IF_ERROR(communicator->Connect(rendezvous));
  return communicator;
}

absl::Status CanJoinGpus() { return OpenNccl(); }

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuRanks(const RankJoin& join) {
  TREADLE_RETURN_IF_ERROR(OpenNccl());
  return CreateNcclCommunicator({.rank = join.rank, .size = join.size, .timeout = join.timeout},
                                cuda::DeviceOf(join.backend), join.rendezvous);
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinGpuLink(const RankJoin& join) {
  TREADLE_RETURN_IF_ERROR(OpenNccl());
  NcclOptions options{.rank = join.rank, .size = join.size, .link = true, .timeout = join.timeout};
  options.connect_timeout = std::min(join.timeout, options.connect_timeout);
  return CreateNcclCommunicator(options, cuda::DeviceOf(join.backend), join.rendezvous);
}

}  // namespace treadle
