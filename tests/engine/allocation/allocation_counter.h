// Counts every allocation of the process, for tests in binaries of their own
// (allocation_counter.cc).
#pragma once

#include <cstdint>

namespace treadle {

// Since the process began. Any thread.
int64_t Allocations();

}  // namespace treadle
