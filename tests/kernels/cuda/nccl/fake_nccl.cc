#include "tests/kernels/cuda/nccl/fake_nccl.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/collectives/nccl_lane.h"
#include "kernels/cuda/runtime/device.h"

namespace treadle {

absl::Status OpenNccl() { return absl::OkStatus(); }

std::atomic<int> FakeNccl::misuses = 0;
std::atomic<int> FakeNccl::living = 0;
std::atomic<int> FakeNccl::destroyed = 0;
std::atomic<int> FakeNccl::aborted = 0;
std::atomic<int> FakeNccl::failing_rank = -1;

void FakeNccl::Reset() { misuses = living = destroyed = aborted = 0, failing_rank = -1; }

namespace {

std::mutex g_mutex;

// Runs as far as it can; true when it is done.
using Work = std::function<bool()>;

struct End {  // of a transfer, at the head of its rank's queue
  void* data = nullptr;
  size_t bytes = 0;
  bool done = false;
};

struct Group {  // all ranks' communicators of one id
  int size = 0;
  int joined = 0;
  int finalized = 0;
  std::map<std::pair<int, int>, End*> sends;  // [from, to] that run now
  // The collective that runs now: what each rank brought, and how many have left it.
  std::map<int, std::pair<const void*, void*>> buffers;
  int left = 0;
  bool copied = false;
};

}  // namespace
}  // namespace treadle

using treadle::End;
using treadle::FakeNccl;
using treadle::g_mutex;
using treadle::Group;
using treadle::Work;

// Where an event was recorded last: a point in a stream.
struct Point {
  bool passed = false;
  treadle::cuda::Device* device = nullptr;  // of whose stream; null: a lane's
  CUstream_st* lane = nullptr;
};
struct CUstream_st {
  std::deque<Work> queue;
  std::deque<std::shared_ptr<Point>> waits;  // for devices
};
struct CUevent_st {
  std::shared_ptr<Point> point;  // null: never recorded, which is as good as passed
};
struct ncclComm {
  std::shared_ptr<Group> group;
  int rank = 0;
  bool revoked = false;
  bool finalizing = false;
  bool in_call = false;
  // Graphs and late work that use it hold on to this. False: it is gone.
  std::shared_ptr<bool> use = std::make_shared<bool>(true);
  std::deque<Work> now;  // what was issued on the null stream
};

namespace treadle {
namespace {

std::map<std::string, std::shared_ptr<Group>> g_groups;
std::vector<CUstream_st*> g_streams;
std::vector<ncclComm*> g_comms;
int g_ids = 0;

void Misuse() { ++FakeNccl::misuses; }

// Everything that can run, on all ranks.
void Pump() {
  bool moved = true;
  const auto run = [&](std::deque<Work>& queue) {
    while (!queue.empty() && queue.front()()) {
      queue.pop_front();
      moved = true;
    }
  };
  while (moved) {
    moved = false;
    for (CUstream_st* stream : g_streams) run(stream->queue);
    for (ncclComm* comm : g_comms) run(comm->now);
  }
}

bool IsLane(cudaStream_t stream) { return std::ranges::find(g_streams, stream) != g_streams.end(); }

cuda::Device* DeviceOf(cudaStream_t stream) {
  return static_cast<cuda::Device*>(static_cast<void*>(stream));
}

struct Call {  // no two threads in the library with one communicator
  explicit Call(ncclComm* c) : comm(c) {
    if (std::exchange(comm->in_call, true)) Misuse();
  }
  ~Call() { comm->in_call = false; }
  ncclComm* comm;
};

ncclResult_t Push(ncclComm* comm, cudaStream_t stream, Work work) {
  if (comm->revoked || comm->finalizing) Misuse();
  const auto unless_revoked = [comm, work = std::move(work)] { return comm->revoked || work(); };
  (IsLane(stream) ? stream->queue : comm->now).push_back(unless_revoked);
  Pump();
  return ncclInProgress;
}

Work CollectiveWork(ncclComm* comm, const void* in, void* out,
                    const std::function<void(Group&)>& copy) {
  return [comm, in, out, copy, entered = false]() mutable {
    Group& group = *comm->group;
    if (!entered) {
      if (group.left > 0) return false;  // others still leave the one before
      group.buffers[comm->rank] = {in, out};
      entered = true;
    }
    if (static_cast<int>(group.buffers.size()) < group.size) return false;
    if (!std::exchange(group.copied, true)) copy(group);
    if (++group.left == group.size) {
      group.buffers.clear();
      group.left = 0;
      group.copied = false;
    }
    return true;
  };
}

// Whether the device runs work when it is issued, and has run all before it; else it is recorded,
// or runs late.
bool RunsNow(cuda::Device& device) {
  const auto ran = std::make_shared<bool>(false);
  device.RunOnHost([ran] { *ran = true; });
  return *ran;
}

// A device's work in its turn: the other ranks' devices come to it, too, or it is broken off.
void RunInTurn(ncclComm* comm, const std::shared_ptr<bool>& use, const Work& work) {
  const auto done = std::make_shared<bool>(false);
  {
    const std::lock_guard lock(g_mutex);
    if (!*use) return Misuse();
    if (comm->revoked) return;
    comm->now.push_back([=] { return *done = comm->revoked || work(); });
  }
  for (;;) {
    {
      const std::lock_guard lock(g_mutex);
      Pump();
      if (*done) return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

ncclResult_t Collective(ncclComm* comm, cudaStream_t stream, const void* in, void* out,
                        const std::function<void(Group&)>& copy) {
  cuda::Device* device = nullptr;
  {
    const std::lock_guard lock(g_mutex);
    if (!IsLane(stream)) device = DeviceOf(stream);
  }
  if (device != nullptr && !RunsNow(*device)) {
    const std::lock_guard lock(g_mutex);
    const Call call(comm);
    if (comm->revoked || comm->finalizing) Misuse();
    const auto use = comm->use;
    device->RunOnHost([=] { RunInTurn(comm, use, CollectiveWork(comm, in, out, copy)); });
    return ncclInProgress;
  }
  const std::lock_guard lock(g_mutex);
  const Call call(comm);
  return Push(comm, stream, CollectiveWork(comm, in, out, copy));
}

// Passes its point when the device has come to it, or never will.
struct Passing {
  explicit Passing(std::shared_ptr<Point> at) : point(std::move(at)) {}
  ~Passing() {
    const std::lock_guard lock(g_mutex);
    point->passed = true;
    Pump();
  }
  const std::shared_ptr<Point> point;
};

// The device whose work the event waits for, if there is one: the caller's, whose time it is.
cuda::Device* Awaited(cudaEvent_t event) {
  const std::lock_guard lock(g_mutex);
  const std::shared_ptr<Point>& point = event->point;
  if (point == nullptr || point->passed) return nullptr;
  if (point->device != nullptr) return point->device;
  auto& waits = point->lane->waits;
  while (!waits.empty() && waits.front()->passed) waits.pop_front();
  return waits.empty() ? nullptr : waits.front()->device;
}

// Work that a communicator had issued is not to be had any more.
void Forget(ncclComm* comm) {
  comm->revoked = true;
  std::erase_if(comm->group->sends,
                [&](const auto& send) { return send.first.first == comm->rank; });
  Pump();
}

}  // namespace
}  // namespace treadle

using treadle::Call;
using treadle::g_comms;
using treadle::g_groups;
using treadle::g_streams;

extern "C" {

// -- the CUDA runtime -----------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::lock_guard lock(g_mutex);
  g_streams.push_back(*stream = new CUstream_st);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(g_mutex);
  if (!stream->queue.empty()) treadle::Misuse();
  std::erase(g_streams, stream);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(g_mutex);
  treadle::Pump();
  return !treadle::IsLane(stream) || stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const std::lock_guard lock(g_mutex);
  if (event->point == nullptr) return cudaSuccess;
  stream->queue.push_back([point = event->point] { return point->passed; });
  if (event->point->device != nullptr) stream->waits.push_back(event->point);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto point = std::make_shared<Point>();
  {
    const std::lock_guard lock(g_mutex);
    event->point = point;
    if (treadle::IsLane(stream)) {
      point->lane = stream;
      stream->queue.push_back([point] { return point->passed = true; });
      treadle::Pump();
      return cudaSuccess;
    }
    point->device = treadle::DeviceOf(stream);
  }
  const auto passing = std::make_shared<treadle::Passing>(point);
  point->device->RunOnHost([passing] {});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (treadle::cuda::Device* const device = treadle::Awaited(event)) {
    device->Synchronize().IgnoreError();
  }
  const std::lock_guard lock(g_mutex);
  treadle::Pump();
  return event->point == nullptr || event->point->passed ? cudaSuccess : cudaErrorNotReady;
}

// -- NCCL -----------------------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(g_mutex);
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->internal, sizeof(id->internal), "id %d", treadle::g_ids++);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const std::lock_guard lock(g_mutex);
  if (config->blocking != 0) treadle::Misuse();
  std::shared_ptr<Group>& group = g_groups[id.internal];
  if (group == nullptr) group = std::make_shared<Group>();
  group->size = size;
  ++group->joined;
  ++FakeNccl::living;
  g_comms.push_back(*comm = new ncclComm{.group = group, .rank = rank, .now = {}});
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard lock(g_mutex);
  const Call call(comm);
  treadle::Pump();
  const Group& group = *comm->group;
  const bool settled = group.joined == group.size && comm->now.empty() &&
                       (!comm->finalizing || group.finalized == group.size);
  *state = settled ? ncclSuccess : ncclInProgress;
  if (FakeNccl::failing_rank == comm->rank) *state = ncclRemoteError;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const std::lock_guard lock(g_mutex);
  const Call call(comm);
  if (comm->revoked) treadle::Misuse();
  comm->finalizing = true;
  ++comm->group->finalized;
  return ncclInProgress;
}
static ncclResult_t EndComm(ncclComm_t comm, std::atomic<int>& ends) {
  const std::lock_guard lock(g_mutex);
  for (CUstream_st* stream : g_streams) {
    if (comm->revoked) continue;
    if (!stream->queue.empty() && !comm->finalizing) treadle::Misuse();
  }
  if (comm->use.use_count() > 1) treadle::Misuse();
  *comm->use = false;
  treadle::Forget(comm);  // what it had issued ends
  std::erase(g_comms, comm);
  --FakeNccl::living;
  ++ends;
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return EndComm(comm, FakeNccl::destroyed); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { return EndComm(comm, FakeNccl::aborted); }
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  const std::lock_guard lock(g_mutex);
  const Call call(comm);
  if (flags != NCCL_REVOKE_DEFAULT) treadle::Misuse();
  treadle::Forget(comm);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "remote error"; }
const char* ncclGetLastError(ncclComm_t) { return "a peer is gone"; }

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t, ncclComm_t comm,
                           cudaStream_t stream) {
  return treadle::Collective(comm, stream, in, out, [count](Group& group) {
    std::vector<char> all(count * group.size);
    for (const auto& [rank, buffers] : group.buffers) {
      std::memcpy(all.data() + count * rank, buffers.first, count);
    }
    for (const auto& [rank, buffers] : group.buffers) {
      std::memcpy(buffers.second, all.data(), all.size());
    }
  });
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return treadle::Collective(comm, stream, in, out, [=](Group& group) {
    for (const auto& [rank, buffers] : group.buffers) {
      if (rank != root) std::memcpy(buffers.second, group.buffers[root].first, count);
    }
  });
}

// The warm-up's group of a send and a receive is the only one; in this library they run one after
// the other, which for neighbours that begin at one end is as good.
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclInProgress; }

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const std::lock_guard lock(g_mutex);
  const Call call(comm);
  auto end = std::make_shared<End>(End{const_cast<void*>(data), count});
  return treadle::Push(comm, stream, [comm, peer, end] {
    if (!end->done) comm->group->sends[{comm->rank, peer}] = end.get();
    return end->done;
  });
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const std::lock_guard lock(g_mutex);
  const Call call(comm);
  return treadle::Push(comm, stream, [=] {
    const auto it = comm->group->sends.find({peer, comm->rank});
    if (it == comm->group->sends.end()) return false;
    if (it->second->bytes != count) treadle::Misuse();
    std::memcpy(data, it->second->data, count);
    it->second->done = true;
    comm->group->sends.erase(it);
    return true;
  });
}

}  // extern "C"
