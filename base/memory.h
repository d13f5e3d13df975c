// Memory that this process can still get: what the machine can give without swapping, or less where
// a control group limits the process (a container, a systemd unit).
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <string>

namespace treadle {

struct MemoryAvailable {
  uint64_t bytes = 0;
  bool limited = false;  // by a control group, not by the machine
};

// `root`: the folder in which proc/ and sys/ are found; tests give one of their own. A limit is
// that of the process' group or of any group above it: memory.max of version 2,
// memory.limit_in_bytes of version 1. The group's inactive page cache counts as
// available, as in MemAvailable.
MemoryAvailable AvailableMemory(const std::string& root = "/");

}  // namespace treadle
