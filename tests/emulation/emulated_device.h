// Knobs of the emulated GPUs, for tests only.
//
// Emulated devices 0 and 1 always exist. With `deferred`, work runs as late as the contract of
// kernels/cuda/runtime/device.h allows: when somebody waits for it, and then no further than that
// wait. So a host that overwrites a page-locked buffer too early, or reads a result too early, gets
// wrong data. Otherwise work runs when it is issued, but for launches, of which up to two wait for
// others to come.
//
// For a launch begins (machine.h) when two pieces of work that wait in the stream before it have
// still to run. So a kernel that reads what they write, before it waits for them, gets wrong data.
//
// Thread safety: all of it from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/runtime/device.h"

namespace treadle::cuda {

// A launch as it was asked for.
struct LaunchRecord {
  const void* kernel = nullptr;
  LaunchShape shape;
};

struct EmulationSettings {
  size_t memory_bytes = size_t{4} << 30;
  int multiprocessors = 4;
  // Launches after this many fail, and with them all that follows; -1: none.
  int64_t fail_after_launches = -1;
  bool deferred = false;
  bool warpgroup_matrices = true;  // DeviceProperties
  size_t shared_bytes_per_block = size_t{227} << 10;
  int resident_blocks = 2;       // of any kernel, on a multiprocessor
  bool library_refuses = false;  // cuBLASLt's stand-in has no algorithm
  bool dry = false;              // launches, and what stands in for libraries, do nothing
  std::vector<LaunchRecord>* launches = nullptr;  // told of each, in captures too
  // Products of warpgroups are a unit in the last place off those of warps, as they may be.
  bool warpgroups_round_apart = false;
  // CopyToDevice has taken the host's bytes when it returns, but they arrive as late as deferred
  // work. Stricter than a GPU: for tests in which a kernel's input is what was copied last.
  bool late_uploads = false;
  uint64_t seed = 1;  // of the order of threads
};

// Devices that are opened while it lives have these settings; the last one made counts.
class ScopedEmulation {
 public:
  explicit ScopedEmulation(const EmulationSettings& settings);
  ~ScopedEmulation();
  ScopedEmulation(const ScopedEmulation&) = delete;
  ScopedEmulation& operator=(const ScopedEmulation&) = delete;

 private:
  EmulationSettings before_;
};

// The settings of devices that are opened now.
EmulationSettings CurrentEmulation();

// How often that device has been opened in this process.
int TimesOpened(int ordinal);

}  // namespace treadle::cuda
