// Device on the CUDA runtime. One non-blocking stream; graphs by thread-local stream capture.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "base/status.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/cuda/runtime/launch_settings.h"
#include "kernels/cuda/runtime/probe.h"
#include "kernels/cuda/runtime/wait_watch.h"

namespace treadle::cuda {
namespace {

constexpr int kOldestCapability = 80;  // mma of bf16, cp.async
// sm_90a code runs on these only (PTX: features of an architecture are not in later ones).
constexpr int kWarpgroupCapability = 90;

using Clock = std::chrono::steady_clock;
constexpr auto kLookEvery = std::chrono::milliseconds(1);
constexpr auto kDrain = std::chrono::seconds(10);  // for kernels to end that were broken off

std::string Version(int version) { return Str(version / 1000, ".", version % 1000 / 10); }

std::string Text(cudaError_t error) {
  return Str(cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

// How many devices there are, or why there is none.
absl::StatusOr<int> CountDevices() {
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) {
    cudaGetLastError();
    return absl::FailedPreconditionError(
        "no CUDA driver is installed here (libcuda.so.1 was not found)");
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  if (error == cudaErrorInsufficientDriver) {
    return absl::FailedPreconditionError(Str("the CUDA driver is too old: it supports CUDA ",
                                             Version(driver), ", this build needs ",
                                             Version(runtime)));
  }
  if (error == cudaSuccess || error == cudaErrorNoDevice) {
    return NotFound("the CUDA driver (CUDA ", Version(driver), ") sees no device");
  }
  return absl::FailedPreconditionError(Str("cudaGetDeviceCount: ", Text(error)));
}

struct CudaGraph : Graph {
  ~CudaGraph() override { cudaGraphExecDestroy(executable); }
  cudaGraphExec_t executable = nullptr;
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(DeviceProperties properties)
      : properties_(std::move(properties)),
        name_(Str("CUDA device ", properties_.ordinal, " (", properties_.name, ")")) {}

  ~CudaDevice() override {
    cudaSetDevice(properties_.ordinal);
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    for (const cudaEvent_t mark : marks_) {
      if (mark != nullptr) cudaEventDestroy(mark);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::StatusOr<std::unique_ptr<Device>> OpenBeside() const override {
    auto device = std::make_unique<CudaDevice>(properties_);
    TREADLE_RETURN_IF_ERROR(device->Start());
    return device;
  }
  // Makes the context; the first call that can take long and fail.
  absl::Status Start() {
    TREADLE_ASSIGN_OR_RETURN(settings_, ReadLaunchSettings());
    Check(cudaSetDevice(properties_.ordinal), "cudaSetDevice");
    // The first call that makes a context, and the question whether there is code for it.
    cudaFuncAttributes attributes = {};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, Probe());
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
        error == cudaErrorUnsupportedPtxVersion) {
      cudaGetLastError();
      return absl::FailedPreconditionError(
          Str(name_, ": this build has no code for compute capability ",
              properties_.capability / 10, ".", properties_.capability % 10, ": ", Text(error),
              " (see TREADLE_CUDA_ARCHITECTURES)"));
    }
    Check(error, "cudaFuncGetAttributes");
    // It is the code that knows how to wait, not the device: a later GPU may run that of 8.0.
    int driver = 0;
    Check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    begins_early_ = settings_.early && attributes.ptxVersion >= 90 && driver >= 12030;
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t& mark : marks_) Check(cudaEventCreate(&mark), "cudaEventCreate");
    return status_;
  }

  const DeviceProperties& properties() const override { return properties_; }
  absl::Status status() const override { return status_; }
  void BindThread() override { Check(cudaSetDevice(properties_.ordinal), "cudaSetDevice"); }

  absl::StatusOr<Buffer> Allocate(size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    BindThread();
    if (!status_.ok()) return status_;
    void* data = nullptr;
    const cudaError_t error = cudaMalloc(&data, bytes > 0 ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // not sticky
      return ResourceExhausted(name_, ": ", bytes, " bytes asked for, ", FreeBytes(), " of ",
                               properties_.memory_bytes, " bytes are free");
    }
    Check(error, "cudaMalloc");
    if (!status_.ok()) return status_;
    Buffer buffer(data, bytes, [](void* p) { cudaFree(p); });
    Zero(data, bytes);
    TREADLE_RETURN_IF_ERROR(Synchronize());
    return buffer;
  }

  absl::StatusOr<Buffer> AllocateHost(size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    BindThread();
    if (!status_.ok()) return status_;
    void* data = nullptr;
    const cudaError_t error = cudaMallocHost(&data, bytes > 0 ? bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return ResourceExhausted(name_, ": the host gave no ", bytes, " bytes of page-locked memory");
    }
    Check(error, "cudaMallocHost");
    if (!status_.ok()) return status_;
    return Buffer(data, bytes, [](void* p) { cudaFreeHost(p); });
  }

  size_t FreeBytes() override {
    size_t free = 0;
    size_t total = 0;
    Check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  }

  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    Copy(device, host, bytes, cudaMemcpyHostToDevice);
    Wait();
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    TREADLE_CHECK(!capturing_);
    Copy(host, device, bytes, cudaMemcpyDeviceToHost);
    Wait();
  }
  void CopyToDeviceAsync(void* device, const void* pinned, size_t bytes) override {
    Copy(device, pinned, bytes, cudaMemcpyHostToDevice);
  }
  void CopyToHostAsync(void* pinned, const void* device, size_t bytes) override {
    Copy(pinned, device, bytes, cudaMemcpyDeviceToHost);
  }
  void CopyOnDevice(void* to, const void* from, size_t bytes) override {
    Copy(to, from, bytes, cudaMemcpyDeviceToDevice);
  }
  void Zero(void* device, size_t bytes) override {
    if (!status_.ok() || bytes == 0) return;
    Check(cudaMemsetAsync(device, 0, bytes, stream_), "cudaMemsetAsync");
  }

  absl::Status Synchronize() override {
    TREADLE_CHECK(!capturing_);
    Wait();
    return status_;
  }
  void SetMark(int mark) override {
    TREADLE_CHECK(!capturing_ && mark >= 0 && mark < kMarks);
    if (status_.ok()) Check(cudaEventRecord(marks_[mark], stream_), "cudaEventRecord");
  }
  absl::Status WaitForMark(int mark) override {
    TREADLE_CHECK(!capturing_ && mark >= 0 && mark < kMarks);
    Wait([&] { return cudaEventSynchronize(marks_[mark]); },
         [&] { return cudaEventQuery(marks_[mark]); }, "cudaEventSynchronize");
    return status_;
  }
  void WatchWaits(const void* owner, WaitCheck look) override {
    watch_.Set(owner, std::move(look));
  }
  absl::Status Recover() override {
    if (!broken_off_ || !watch_.empty()) return status_;
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error == cudaErrorNotReady) return status_;
    broken_off_ = false;
    status_ = absl::OkStatus();
    Check(error, "cudaStreamQuery");
    return status_;
  }
  double Seconds(int from, int to) override {
    TREADLE_CHECK(from >= 0 && from < kMarks && to >= 0 && to < kMarks);
    float milliseconds = 0;
    if (status_.ok()) {
      Check(cudaEventElapsedTime(&milliseconds, marks_[from], marks_[to]), "cudaEventElapsedTime");
    }
    return milliseconds * 1e-3;
  }

  void BeginCapture() override {
    TREADLE_CHECK(!capturing_);
    capturing_ = true;
    if (!status_.ok()) return;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
  }
  absl::StatusOr<std::unique_ptr<Graph>> EndCapture() override {
    TREADLE_CHECK(capturing_);
    capturing_ = false;
    // Also after an error: the stream must leave capture mode.
    cudaGraph_t graph = nullptr;
    absl::Status status = status_;
    Keep(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture", status);
    auto captured = std::make_unique<CudaGraph>();
    if (status.ok()) {
      Keep(cudaGraphInstantiate(&captured->executable, graph, 0), "cudaGraphInstantiate", status);
    }
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (status.ok()) {
      Keep(cudaGraphUpload(captured->executable, stream_), "cudaGraphUpload", status);
    }
    if (!status.ok()) return status;
    return captured;
  }
  void Replay(const Graph& graph) override {
    TREADLE_CHECK(!capturing_);
    if (!status_.ok()) return;
    Check(cudaGraphLaunch(static_cast<const CudaGraph&>(graph).executable, stream_),
          "cudaGraphLaunch");
  }
  bool capturing() const override { return capturing_; }

  void* stream() override { return stream_; }
  void RunOnHost(std::function<void()>) override { TREADLE_CHECK(false); }  // has libraries

 protected:
  void LaunchRaw(const void* kernel, const LaunchShape& shape, void* params, size_t,
                 Invoker) override {
    if (!status_.ok() || !Prepare(kernel)) return;
    // Programmatic dependent launch. Every kernel of ours waits for what is before it in the stream
    // (simt::AwaitEarlierLaunches), so every launch may begin early. What is relied on, from CUDA's
    // documentation (Programming Guide, "Programmatic Dependent Launch"; cudaLaunchAttributeID):
    //   * only kernels overlap: the attribute concerns "the previous kernel in the stream, if that
    //     kernel requests the overlap"; behind a copy, a fill or a graph's replay a launch begins
    //     when that is done, as without it;
    //   * a launch without it (cuBLASLt's, NCCL's), a copy and an event see all that is before them
    //     complete, whether or not that let its successors begin;
    //   * the wait is for whole grids and their memory: a library's kernel that never lets
    //     successors begin is waited for to its end, one that has the attribute waits by itself;
    //   * in a capture (CUDA 12.3 and later) it makes the edge between two kernels a programmatic
    //     one; all other edges stay full ones.
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(shape.grid_x, shape.grid_y, shape.grid_z);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream_;
    config.attrs = &early;
    config.numAttrs = begins_early_ ? 1 : 0;
    const cudaError_t error = cudaLaunchKernelExC(&config, kernel, &params);
    if (error == cudaSuccess) return;
    Check(error, Str("cudaLaunchKernelExC of (", shape.grid_x, ", ", shape.grid_y, ", ",
                     shape.grid_z, ") blocks of ", shape.threads, " threads with ",
                     shape.shared_bytes, " bytes of shared memory"));
  }
  int ResidentRaw(const void* kernel, const LaunchShape& shape) override {
    if (!status_.ok() || !Prepare(kernel)) return 1;
    int& blocks = resident_[{kernel, shape.threads, shape.shared_bytes}];
    if (blocks > 0) return blocks;
    Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
              &blocks, kernel, static_cast<int>(shape.threads), shape.shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return blocks = std::max(blocks, 1);
  }

 private:
  // Before a kernel's first launch: loads it, and lets it have all the shared memory that a block
  // can have. Also in a capture, of which this is no part.
  bool Prepare(const void* kernel) {
    if (!prepared_.insert(kernel).second) return true;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    Check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    cudaFuncAttributes attributes = {};
    Check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(properties_.shared_bytes_per_block)),
          "cudaFuncSetAttribute(MaxDynamicSharedMemorySize)");
    if (settings_.carve_out >= 0) {
      Check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 settings_.carve_out),
            "cudaFuncSetAttribute(PreferredSharedMemoryCarveout)");
    }
    Check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    return status_.ok();
  }
  // Keeps the first error. Calls report errors of earlier asynchronous work, too.
  void Check(cudaError_t error, std::string_view call) { Keep(error, call, status_); }
  void Keep(cudaError_t error, std::string_view call, absl::Status& status) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    if (status.ok()) status = Internal(name_, ": ", call, ": ", Text(error));
  }
  void Wait() {
    Wait([&] { return cudaStreamSynchronize(stream_); }, [&] { return cudaStreamQuery(stream_); },
         "cudaStreamSynchronize");
  }
  // With watches it asks instead of waiting, so that somebody else's fault ends it. What has been
  // broken off is still waited for, for kernels that run touch memory, but not for long.
  template <typename Synchronize, typename Query>
  void Wait(Synchronize synchronize, Query query, std::string_view call) {
    if (!status_.ok() && !broken_off_) return;
    if (watch_.empty() && !broken_off_) return Check(synchronize(), call);
    const Clock::time_point begin = Clock::now();
    Clock::time_point next_look = begin + kLookEvery;
    Clock::time_point end = broken_off_ ? begin + kDrain : Clock::time_point::max();
    for (;;) {
      const cudaError_t error = query();
      if (error != cudaErrorNotReady) return Check(error, call);
      const Clock::time_point now = Clock::now();
      if (now > end) return;
      if (now < next_look) continue;
      next_look = now + kLookEvery;
      if (!status_.ok()) continue;
      status_ = watch_.Look(std::chrono::duration<double>(now - begin).count());
      broken_off_ = !status_.ok();
      if (broken_off_) end = now + kDrain;
    }
  }
  void Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (!status_.ok() || bytes == 0) return;
    Check(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync");
  }

  const DeviceProperties properties_;
  const std::string name_;
  LaunchSettings settings_;
  bool begins_early_ = false;  // launches, before those before them have ended
  cudaStream_t stream_ = nullptr;
  cudaEvent_t marks_[kMarks] = {};
  WaitWatch watch_;
  absl::Status status_;
  bool broken_off_ = false;  // status_ is a watch's
  bool capturing_ = false;
  std::unordered_set<const void*> prepared_;  // kernels
  // By kernel, threads and bytes of shared memory.
  std::map<std::tuple<const void*, uint32_t, size_t>, int> resident_;
};

}  // namespace

absl::StatusOr<DeviceProperties> Device::Describe(int ordinal) {
  TREADLE_ASSIGN_OR_RETURN(const int count, CountDevices());
  if (ordinal < 0 || ordinal >= count) {
    return NotFound("no CUDA device ", ordinal, ": there ", count == 1 ? "is " : "are ", count,
                    ", counted from 0");
  }
  cudaDeviceProp found = {};
  if (const cudaError_t error = cudaGetDeviceProperties(&found, ordinal); error != cudaSuccess) {
    return Internal("CUDA device ", ordinal, ": cudaGetDeviceProperties: ", Text(error));
  }
  char bus_id[32] = {};
  if (const cudaError_t error = cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), ordinal);
      error != cudaSuccess) {
    return Internal("CUDA device ", ordinal, ": cudaDeviceGetPCIBusId: ", Text(error));
  }
  const int capability = 10 * found.major + found.minor;
  const DeviceProperties properties = {
      .ordinal = ordinal,
      .name = found.name,
      .bus_id = bus_id,
      .multiprocessors = found.multiProcessorCount,
      .capability = capability,
      .warpgroup_matrices = TREADLE_CUDA_SM90A != 0 && capability == kWarpgroupCapability,
      .memory_bytes = found.totalGlobalMem,
      .shared_bytes_per_block = found.sharedMemPerBlockOptin};
  if (properties.capability < kOldestCapability) {
    return absl::FailedPreconditionError(Str("CUDA device ", ordinal, " (", found.name,
                                             ") has compute capability ", found.major, ".",
                                             found.minor, "; 8.0 or later is needed"));
  }
  return properties;
}

absl::StatusOr<std::unique_ptr<Device>> Device::Open(int ordinal) {
  TREADLE_ASSIGN_OR_RETURN(DeviceProperties properties, Describe(ordinal));
  auto device = std::make_unique<CudaDevice>(std::move(properties));
  TREADLE_RETURN_IF_ERROR(device->Start());
  return device;
}

int Device::Count(std::string* why) {
  why->clear();
  const absl::StatusOr<int> count = CountDevices();
  if (count.ok()) return *count;
  *why = std::string(count.status().message());
  return 0;
}

}  // namespace treadle::cuda
