#include "engine/kv/kept_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "base/sha256.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kAlignment = 4096;

// Grows the file to `end` bytes, if it is smaller.
absl::StatusOr<Buffer> Map(int fd, size_t begin, size_t bytes) {
  struct stat now = {};
  const auto end = static_cast<off_t>(begin + bytes);
  if (fstat(fd, &now) == 0 && (now.st_size >= end || ftruncate(fd, end) == 0)) {
    void* const at =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(begin));
    if (at != MAP_FAILED) {
      madvise(at, bytes, MADV_HUGEPAGE);  // a refusal only costs speed
      return Buffer(at, bytes, [bytes](void* data) { munmap(data, bytes); });
    }
  }
  return ResourceExhausted("no kept memory of ", bytes, " bytes: ", std::strerror(errno));
}

}  // namespace

struct KeptMemory::Header {
  char what[64];  // SHA-256, in digits
  MemoryIdentity identity;
};

uint64_t MemoryIdentity::For(uint64_t master_id) {
  if (number == 0 || master != master_id) {
    // In this order: a process that is killed in between leaves a number that nobody knows.
    std::random_device device;
    number = (uint64_t{device()} << 32) | device() | 1;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    master = master_id;
  }
  return number;
}

absl::StatusOr<std::unique_ptr<KeptMemory>> KeptMemory::Open(int fd, std::string_view what) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(what)));
  const std::string digits = sum.Finish();
  TREADLE_CHECK(digits.size() == sizeof(Header::what));
  TREADLE_ASSIGN_OR_RETURN(Buffer header, Map(fd, 0, kAlignment));
  std::unique_ptr<KeptMemory> memory(new KeptMemory(fd, std::move(header)));
  if (std::memcmp(memory->header().what, digits.data(), digits.size()) == 0) return memory;
  if (ftruncate(fd, 0) != 0 || ftruncate(fd, kAlignment) != 0) {
    return absl::UnavailableError(Str("kept memory cannot be emptied: ", std::strerror(errno)));
  }
  std::memcpy(memory->header().what, digits.data(), digits.size());
  return memory;
}

KeptMemory::KeptMemory(int fd, Buffer header)
    : fd_(fd), header_(std::move(header)), end_(kAlignment) {}

KeptMemory::Header& KeptMemory::header() const {
  return *reinterpret_cast<Header*>(header_.data());
}

absl::StatusOr<Buffer> KeptMemory::Take(size_t bytes) {
  const size_t begin = end_;
  end_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return Map(fd_, begin, end_ - begin);
}

MemoryIdentity& KeptMemory::identity() { return header().identity; }

}  // namespace treadle
