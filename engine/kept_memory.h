// Memory that outlives its process: of a file that whoever starts workers holds open, and gives to
// the next one in a lost worker's place (worker_supervisor.h). K/V that a process had computed when
// it was killed need not be computed again.
//
// A stamp says whose contents it has. What was being written when the process ended may be torn; it
// is nothing that the results which it had given spoke of.
//
// Thread safety: thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "kernels/buffer.h"

namespace treadle {

class KeptMemory {
 public:
  // A master's epoch; the default: none.
  struct Stamp {
    uint64_t master = 0;
    uint64_t epoch = 0;
    friend bool operator==(const Stamp&, const Stamp&) = default;
  };

  // `fd`: of memfd_create, and stays the caller's. `what`: all that decides how it is used; what
  // was kept for something else is dropped. Errors: of the system.
  static absl::StatusOr<std::unique_ptr<KeptMemory>> Open(int fd, std::string_view what);

  // The next part of it, in the same order each time; zeros where nothing was kept.
  absl::StatusOr<Buffer> Take(size_t bytes);

  // Of the last epoch that worked with it, in this process or one before.
  Stamp stamp() const;
  void SetStamp(const Stamp& stamp);

 private:
  struct Header;
  KeptMemory(int fd, Buffer header);
  Header& header() const;

  const int fd_;
  const Buffer header_;
  size_t end_;
};

}  // namespace treadle
