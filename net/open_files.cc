#include "net/open_files.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <string>

#include "base/status.h"

namespace treadle {
namespace {

// The least limit under which `count` more files can be opened: a limit is one of numbers, and
// those of files that were inherited may lie above it.
rlim_t LeastLimit(size_t count) {
  int number = 0;
  for (size_t free = 0; free < count; ++number) {
    if (fcntl(number, F_GETFD) < 0) ++free;
  }
  return static_cast<rlim_t>(number);
}

}  // namespace

absl::Status ReserveFiles(std::span<const FileNeed> needs) {
  size_t count = 0;
  std::string purposes;
  for (const FileNeed& need : needs) {
    if (need.count == 0) continue;
    count += need.count;
    purposes += Str(", ", need.count, " for ", need.what);
  }
  const rlim_t least = LeastLimit(count);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return absl::OkStatus();
  if (files.rlim_cur < least && files.rlim_cur < files.rlim_max) {
    rlimit more = files;
    more.rlim_cur = std::min(least, files.rlim_max);
    if (setrlimit(RLIMIT_NOFILE, &more) == 0) files = more;
  }
  if (files.rlim_cur >= least) return absl::OkStatus();
  return ResourceExhausted("this process may open ", files.rlim_cur, " files, expected at least ",
                           least, " (ulimit -n ", least, "): ", least - count, " are open already",
                           purposes);
}

}  // namespace treadle
