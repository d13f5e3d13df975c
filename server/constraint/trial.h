// Tries work that may cost too much: in a child process of bounded time and memory.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace treadle {

// Whether `work` comes to its end. The library can be neither interrupted nor told how much it may
// allocate, and what a constraint costs depends on how many ways it has to read the same text.
// In the child there is one thread, and the locks of others are taken for ever: `work` uses none
// but the allocator's. InvalidArgument, which names `what` was tried, if it costs too much;
// Unavailable if this machine had no process or no time for it. Thread safety: any thread.
absl::Status InTrial(const std::function<void()>& work, const std::string& what);

}  // namespace treadle
