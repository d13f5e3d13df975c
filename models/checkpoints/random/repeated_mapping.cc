#include "models/checkpoints/random/repeated_mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace treadle {
namespace {

absl::Status Refused(const char* what, size_t bytes) {
  return ResourceExhausted("memory for ", bytes, " bytes of repeated data: ", what, ": ",
                           std::strerror(errno));
}

// A file without a name that holds `block`, filled up to `bytes`; negative if there is none.
int FileOf(std::span<const std::byte> block, size_t bytes) {
  const int file = memfd_create("repeated", MFD_CLOEXEC);
  if (file < 0) return file;
  bool complete = ftruncate(file, static_cast<off_t>(bytes)) == 0;
  for (size_t done = 0; complete && done < block.size();) {
    const ssize_t wrote =
        pwrite(file, block.data() + done, block.size() - done, static_cast<off_t>(done));
    complete = wrote > 0 || (wrote < 0 && errno == EINTR);
    if (wrote > 0) done += static_cast<size_t>(wrote);
  }
  if (complete) return file;
  close(file);
  return -1;
}

size_t WholePages(size_t bytes) {
  const size_t page = RepeatedMapping::PageBytes();
  return std::max(page, (bytes + page - 1) / page * page);
}

}  // namespace

size_t RepeatedMapping::PageBytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

absl::StatusOr<std::unique_ptr<RepeatedMapping>> RepeatedMapping::Create(
    std::span<const std::byte> block, size_t bytes) {
  const size_t period = WholePages(block.size());
  const size_t size = WholePages(bytes);
  const int file = FileOf(block, period);
  if (file < 0) return Refused("memfd", period);
  // Address space first, so that the pieces lie side by side.
  void* const space =
      mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    close(file);
    return Refused("mmap", size);
  }
  auto* const data = static_cast<std::byte*>(space);
  std::unique_ptr<RepeatedMapping> mapping(new RepeatedMapping(data, size));
  absl::Status status;
  for (size_t at = 0; at < size && status.ok(); at += period) {
    void* const piece =
        mmap(data + at, std::min(period, size - at), PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
    if (piece == MAP_FAILED) status = Refused("mmap", size);
  }
  close(file);
  TREADLE_RETURN_IF_ERROR(status);
  return mapping;
}

RepeatedMapping::~RepeatedMapping() { munmap(data_, bytes_); }

}  // namespace treadle
