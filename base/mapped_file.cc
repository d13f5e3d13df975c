#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "base/status.h"

namespace treadle {
namespace {

FileState StateOf(const struct stat& info) {
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .bytes = static_cast<uint64_t>(info.st_size),
          .written = int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

struct sigaction before;  // the handler of SIGBUS that ours stands in front of

}  // namespace

// Lives for ever, because the handler may look at any of them at any time.
struct MappedFile::Watch {
  std::atomic<bool> taken = false;
  std::atomic<const std::byte*> begin = nullptr;  // null: no file
  std::atomic<size_t> bytes = 0;
  std::atomic<bool> broken = false;  // some of it could not be read

  static Watch all[4096];  // the shards of the largest checkpoints are some hundreds
};
MappedFile::Watch MappedFile::Watch::all[];

// Only what may be done in a handler: system calls and atomics.
void MappedFile::OnBusError(int signal, siginfo_t* info, void* context) {
  const auto* const at = static_cast<const std::byte*>(info->si_addr);
  for (Watch& watch : Watch::all) {
    const std::byte* const begin = watch.begin.load();
    if (begin == nullptr || at < begin || at >= begin + watch.bytes.load()) continue;
    watch.broken = true;
    // Zeros from here to the end, in the place of what is not there.
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = reinterpret_cast<uintptr_t>(at) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + watch.bytes.load();
    const int error = errno;
    const void* const zeros = mmap(reinterpret_cast<void*>(first), end - first, PROT_READ,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    errno = error;
    if (zeros != MAP_FAILED) return;
  }
  sigaction(signal, &before, nullptr);  // it happens again, to whoever was here before
}

MappedFile::Watch* MappedFile::WatchFor(std::span<const std::byte> bytes) {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_sigaction = OnBusError;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGBUS, &action, &before) == 0;
  }();
  TREADLE_CHECK(installed);
  for (Watch& watch : Watch::all) {
    if (watch.taken.exchange(true)) continue;
    watch.broken = false;
    watch.bytes = bytes.size();
    watch.begin = bytes.data();
    return &watch;
  }
  return nullptr;
}

absl::StatusOr<std::unique_ptr<MappedFile>> MappedFile::Open(const std::string& path) {
  // A pipe under that name must not make us wait for who writes to it.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return NotFound(path, ": cannot be opened: ", std::strerror(errno));
  struct stat info {};
  if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(file);
    return InvalidArgument(path, ": is not a regular file");
  }
  if (info.st_size == 0) {
    close(file);
    return InvalidArgument(path, ": is empty");
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    close(file);
    return Internal(path, ": cannot be mapped: ", std::strerror(error));
  }
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(data), size);
  constexpr std::string_view kPointer = "version https://git-lfs.github.com/spec/";
  if (std::string_view(static_cast<const char*>(data), size).starts_with(kPointer)) {
    munmap(data, size);
    close(file);
    return InvalidArgument(
        path, ": is a Git LFS pointer and not the file itself, which 'git lfs pull' fetches");
  }
  Watch* const watch = WatchFor(bytes);
  if (watch == nullptr) {
    munmap(data, size);
    close(file);
    return ResourceExhausted(path, ": cannot be mapped: ", std::size(Watch::all),
                             " files are mapped already");
  }
  return std::unique_ptr<MappedFile>(new MappedFile(path, file, StateOf(info), bytes, *watch));
}

MappedFile::~MappedFile() {
  watch_.begin = nullptr;
  watch_.taken = false;
  munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  close(file_);
}

absl::Status MappedFile::CheckUnchanged() const {
  struct stat info {};
  const bool known = fstat(file_, &info) == 0;
  const FileState now = StateOf(info);
  if (known && now == state_ && !watch_.broken) return absl::OkStatus();
  if (known && now == state_) return InvalidArgument(path_, ": some of it cannot be read");
  return InvalidArgument(path_, ": was changed while it was read: it had ", state_.bytes,
                         " bytes, now it has ", now.bytes,
                         ", expected it to stay as it is until it is loaded");
}

void DropMappedPages(const std::byte* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (data != nullptr && begin < end)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace treadle
