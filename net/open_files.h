// How many files this process may have open (RLIMIT_NOFILE): whether they suffice, before work
// begins that would fail in the middle.
//
// Thread safety: any thread; the answer holds as long as nobody else opens files.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "absl/status/status.h"

namespace treadle {

// Files that will be open at once, beside those that are open now.
struct FileNeed {
  std::string_view what;  // "the HTTP server"
  size_t count;
};

// OK if so many more files can be opened. Raises the soft limit as far as that takes and the hard
// limit allows. ResourceExhausted names the limit, the least one that would do, and what it is for.
absl::Status ReserveFiles(std::span<const FileNeed> needs);

}  // namespace treadle
