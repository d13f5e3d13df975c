// A GPU as this backend sees it: memory, one stream, launches, captured graphs. No vendor types.
//
// Two implementations of the same functions: cuda_device.cc (CUDA runtime) and
// emulation/emulated_device.cc (the host; for tests). Neither knows an op.
//
// Errors: the first failure of anything asynchronous (a launch, a copy, a kernel) stays; status()
// and Synchronize() return it, and after it nothing is launched. Messages name the device and the
// call. Thread safety: everything on the rank's thread, but for Allocate and the synchronous
// copies, which any one thread may use before the first launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/buffer.h"

namespace treadle::cuda {

struct DeviceProperties {
  int ordinal = 0;
  std::string name;
  std::string bus_id;  // the same in every process of this machine: "0000:3b:00.0"
  int multiprocessors = 0;
  int capability = 0;  // 90: 9.0
  // It has, and this build has code for, what kernels/cuda/runtime/warpgroup.h needs.
  bool warpgroup_matrices = false;
  size_t memory_bytes = 0;
  size_t shared_bytes_per_block = 0;  // the most that a launch may ask for
};

// Blocks and threads are counted in one and three dimensions as simt.h says.
struct LaunchShape {
  uint32_t grid_x = 1;
  uint32_t grid_y = 1;
  uint32_t grid_z = 1;
  uint32_t threads = 32;    // a multiple of 32, at most 1024
  size_t shared_bytes = 0;  // above 48 KB is asked of the driver
};

// A captured graph, to be replayed. Belongs to its device.
class Graph {
 public:
  virtual ~Graph() = default;
};

class Device {
 public:
  // Failures say what was found: no driver, a driver too old, no such device, a device that is too
  // old. Takes nothing of the device: no context is made on it.
  static absl::StatusOr<DeviceProperties> Describe(int ordinal);
  // Failures: Describe's, and a device that this build has no code for.
  static absl::StatusOr<std::unique_ptr<Device>> Open(int ordinal);
  // How many there are; 0 with a reason in `why` if there is no driver.
  static int Count(std::string* why);
  virtual ~Device() = default;
  // The same device and its memory, with another stream, which knows nothing of this one's order.
  virtual absl::StatusOr<std::unique_ptr<Device>> OpenBeside() const = 0;

  virtual const DeviceProperties& properties() const = 0;
  virtual absl::Status status() const = 0;
  // Makes it the calling thread's device.
  virtual void BindThread() = 0;

  // -- memory -------------------------------------------------------------------------------------
  // 256-byte aligned, zeroed. ResourceExhausted names what was asked and what is free.
  virtual absl::StatusOr<Buffer> Allocate(size_t bytes) = 0;
  // Page-locked host memory.
  virtual absl::StatusOr<Buffer> AllocateHost(size_t bytes) = 0;
  virtual size_t FreeBytes() = 0;

  // In stream order. The asynchronous ones need page-locked host memory, which must stay as it is
  // until the copy is done.
  virtual void CopyToDevice(void* device, const void* host, size_t bytes) = 0;  // done on return
  virtual void CopyToHost(void* host, const void* device, size_t bytes) = 0;    // done on return
  virtual void CopyToDeviceAsync(void* device, const void* pinned, size_t bytes) = 0;
  virtual void CopyToHostAsync(void* pinned, const void* device, size_t bytes) = 0;
  virtual void CopyOnDevice(void* to, const void* from, size_t bytes) = 0;  // no overlap
  virtual void Zero(void* device, size_t bytes) = 0;

  // -- order --------------------------------------------------------------------------------------
  virtual absl::Status Synchronize() = 0;
  // A point in the stream that the host can wait for without waiting for what comes after it. Marks
  // 0 .. kMarks - 1 are reused.
  static constexpr int kMarks = 4;
  virtual void SetMark(int mark) = 0;
  virtual absl::Status WaitForMark(int mark) = 0;
  // While the host waits (Synchronize, WaitForMark, copies that are done on return), `look` is
  // called about every millisecond with the seconds waited; an error of it ends the wait and
  // becomes status(), and all others are then told infinity. For what only another device can end.
  // The rank's thread; an empty function removes the owner's.
  using WaitCheck = std::function<absl::Status(double seconds)>;
  virtual void WatchWaits(const void* owner, WaitCheck look) = 0;
  // Forgets an error of a `look` once nobody watches any more and all that was issued has come to
  // its end, with undefined results. Returns status(): a failure of the device itself stays.
  virtual absl::Status Recover() = 0;
  // Seconds of device time between two marks that have been passed (0 in the emulation).
  virtual double Seconds(int from, int to) = 0;

  // -- launches -----------------------------------------------------------------------------------
  // A launch may begin before those before it have ended: its kernel waits for them (simt.h).
  template <typename Params>
  void Launch(void (*kernel)(Params), const LaunchShape& shape, const Params& params) {
    static_assert(sizeof(Params) <= 4096);
    Params copy = params;
    LaunchRaw(reinterpret_cast<const void*>(kernel), shape, &copy, sizeof(Params), &Invoke<Params>);
  }

  // How many blocks of a launch run on a multiprocessor at the same time; at least 1.
  template <typename Params>
  int Resident(void (*kernel)(Params), const LaunchShape& shape) {
    return ResidentRaw(reinterpret_cast<const void*>(kernel), shape);
  }

  // Everything asynchronous between the two is recorded instead of run. What EndCapture fails for
  // is the graph's failure, not the device's.
  virtual void BeginCapture() = 0;
  virtual absl::StatusOr<std::unique_ptr<Graph>> EndCapture() = 0;
  virtual void Replay(const Graph& graph) = 0;
  virtual bool capturing() const = 0;

  // The vendor's stream handle, for the libraries' wrappers (cuBLASLt, NCCL). In the emulation:
  // this Device, for what stands in for them.
  virtual void* stream() = 0;
  // The emulation has no libraries: wrappers run or record a host function in their place. CHECKs
  // on a real device.
  virtual void RunOnHost(std::function<void()> work) = 0;

 protected:
  using Invoker = void (*)(const void* kernel, const void* params);
  virtual void LaunchRaw(const void* kernel, const LaunchShape& shape, void* params, size_t bytes,
                         Invoker invoke) = 0;
  virtual int ResidentRaw(const void* kernel, const LaunchShape& shape) = 0;

 private:
  // How the emulation runs one thread of a kernel.
  template <typename Params>
  static void Invoke(const void* kernel, const void* params) {
#if !defined(__CUDACC__)
    reinterpret_cast<void (*)(Params)>(const_cast<void*>(kernel))(
        *static_cast<const Params*>(params));
#endif
  }
};

}  // namespace treadle::cuda
