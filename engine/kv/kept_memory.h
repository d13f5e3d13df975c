// Memory that outlives its process: it lies in a file that the starter of workers holds open and
// gives to the next one in a lost worker's place (worker_supervisor.h), which need not compute the
// K/V again that a killed process had computed.
//
// The memory has an identity, drawn at random when it is new or was emptied and when another master
// takes it over: a master that meets an identity again knows that nobody emptied the memory
// meanwhile. Rows that were being written when the process ended may be torn; their tags
// (slot_tags.h) say so.
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

// Tells a memory's contents from others', for the master that had them computed.
struct MemoryIdentity {
  uint64_t master = 0;
  uint64_t number = 0;  // 0: none

  // The number for this master: the one there is, or a new one if there is none or it is another
  // master's.
  uint64_t For(uint64_t master_id);
};

class KeptMemory {
 public:
  // `fd`: of memfd_create, and stays the caller's. `what`: all that decides how it is used; what
  // was kept for something else is dropped. Errors: of the system.
  static absl::StatusOr<std::unique_ptr<KeptMemory>> Open(int fd, std::string_view what);

  // The next part of it, in the same order each time; zeros where nothing was kept.
  absl::StatusOr<Buffer> Take(size_t bytes);

  // In the memory itself: a new one's is none.
  MemoryIdentity& identity();

 private:
  struct Header;
  KeptMemory(int fd, Buffer header);
  Header& header() const;

  const int fd_;
  const Buffer header_;
  size_t end_;
};

}  // namespace treadle
