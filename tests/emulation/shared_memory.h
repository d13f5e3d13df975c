// The shared memory of an emulated block. Thread safety: as the machine that it belongs to.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/status.h"

namespace treadle::simt {

inline constexpr unsigned char kPoison = 0xff;  // a NaN in every float type, -1 in every integer

// Shared memory of one block: it ends where a page that cannot be touched begins, but for the bytes
// that its alignment needs; those, and some in front, must be what they were when the block is
// done.
class SharedMemory {
 public:
  SharedMemory() {
    void* memory = mmap(nullptr, kBytes + kPage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TREADLE_CHECK(memory != MAP_FAILED);
    memory_ = static_cast<unsigned char*>(memory);
    TREADLE_CHECK(mprotect(memory_ + kBytes, kPage, PROT_NONE) == 0);
  }
  ~SharedMemory() { munmap(memory_, kBytes + kPage); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  unsigned char* Begin(size_t bytes) {
    unsigned char* begin = memory_ + kBytes - (bytes + kAlignment - 1) / kAlignment * kAlignment;
    std::memset(begin - kCanaryBytes, kPoison, memory_ + kBytes - begin + kCanaryBytes);
    return begin;
  }
  bool IsWhole(const unsigned char* begin, size_t bytes) const {
    const auto poisoned = [](unsigned char c) { return c == kPoison; };
    return std::all_of(begin - kCanaryBytes, begin, poisoned) &&
           std::all_of(begin + bytes, static_cast<const unsigned char*>(memory_ + kBytes),
                       poisoned);
  }

 private:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kAlignment = 1024;
  static constexpr size_t kCanaryBytes = 128;
  static constexpr size_t kBytes = 256 << 10;
  unsigned char* memory_ = nullptr;
};

}  // namespace treadle::simt
