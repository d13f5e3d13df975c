#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <iterator>

#include "base/file_calls.h"
#include "base/sha256.h"
#include "base/status.h"

namespace treadle {
namespace {

class SystemFileCalls final : public FileCalls {};
std::atomic<FileCalls*> file_calls = nullptr;  // null: the system's

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileState StateOf(const struct stat& info) {
  return {.device = info.st_dev,
          .inode = info.st_ino,
          .bytes = static_cast<uint64_t>(info.st_size),
          .written = Nanoseconds(info.st_mtim),
          .changed = Nanoseconds(info.st_ctim)};
}

// Looks at an open file until its last change is at least a tick of the kernel's clock old, so that
// the next change has another time. Gives up on a time in the future, of a file system with another
// clock: false then.
bool WaitUntilSettled(int file, struct stat& info) {
  constexpr int kMostTicks = 50;
  timespec tick = {}, now = {};
  clock_getres(CLOCK_REALTIME_COARSE, &tick);
  for (int i = 0; i < kMostTicks; ++i) {
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (StateOf(info).changed < Nanoseconds(now)) return true;
    nanosleep(&tick, nullptr);
    if (FileCalls::Get().Stat(file, info) != 0) return false;
  }
  return false;
}

struct sigaction before;  // the handler of SIGBUS that ours stands in front of

}  // namespace

int FileCalls::Open(const std::string& path) {
  return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}
int FileCalls::Stat(int file, struct stat& info) { return fstat(file, &info); }
void* FileCalls::Map(int file, size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
}
FileCalls& FileCalls::Get() {
  static SystemFileCalls system;
  FileCalls* const replaced = file_calls.load();
  return replaced != nullptr ? *replaced : system;
}
void FileCalls::Replace(FileCalls* calls) { file_calls = calls; }

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
  FileCalls& calls = FileCalls::Get();
  const int file = calls.Open(path);
  if (file < 0) {
    const int error = errno == ENOTDIR ? ENOENT : errno;
    return absl::ErrnoToStatus(error, Str(path, ": cannot be opened"));
  }
  struct stat info {};
  if (calls.Stat(file, info) != 0 || !S_ISREG(info.st_mode)) {
    close(file);
    return InvalidArgument(path, ": is not a regular file");
  }
  const bool settled = WaitUntilSettled(file, info);
  if (info.st_size == 0) {
    close(file);
    return InvalidArgument(path, ": is empty");
  }
  const auto size = static_cast<size_t>(info.st_size);
  void* const data = calls.Map(file, size);
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
  return std::unique_ptr<MappedFile>(
      new MappedFile(path, file, StateOf(info), info.st_nlink, settled, bytes, *watch));
}

MappedFile::~MappedFile() {
  watch_.begin = nullptr;
  watch_.taken = false;
  munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  close(file_);
}

FileState MappedFile::Expected() const {
  MutexLock lock(mutex_);
  return state_;
}

std::optional<FileState> MappedFile::state() const {
  return settled_ ? std::optional(Expected()) : std::nullopt;
}

bool MappedFile::IsAtItsPath() const {
  struct stat info {};
  return settled_ && stat(path_.c_str(), &info) == 0 && StateOf(info) == Expected();
}

absl::Status MappedFile::Changed(const FileState& now) const {
  const std::string sizes = now.bytes == bytes_.size()
                                ? ""
                                : Str(": it had ", bytes_.size(), " bytes, now it has ", now.bytes);
  return InvalidArgument(path_, ": was changed while it was read", sizes,
                         ", expected it to stay as it is until it is loaded");
}

absl::StatusOr<std::string> MappedFile::ComputeSum(const std::function<bool()>& cancelled) const {
  FileCalls::Get().Use(path_);
  Sha256 sum;
  constexpr size_t kPiece = 1 << 20;
  for (auto bytes = bytes_; !bytes.empty(); bytes = bytes.subspan(std::min(kPiece, bytes.size()))) {
    if (cancelled && cancelled()) return absl::CancelledError("interrupted");
    const auto piece = bytes.first(std::min(kPiece, bytes.size()));
    sum.Add(piece);
    DropMappedPages(piece.data(), piece.size());
  }
  return sum.Finish();
}

absl::StatusOr<std::string> MappedFile::Sum(const std::function<bool()>& cancelled) const {
  MutexLock lock(sum_mutex_);
  if (sum_) return *sum_;
  const FileState expected = Expected();
  if (settled_) sum_ = KnownSum(expected);
  if (sum_) return *sum_;
  TREADLE_ASSIGN_OR_RETURN(std::string sum, ComputeSum(cancelled));
  struct stat info {};
  if (FileCalls::Get().Stat(file_, info) != 0 || StateOf(info) != expected) {
    return Changed(StateOf(info));
  }
  if (watch_.broken) return InvalidArgument(path_, ": some of it cannot be read");
  if (settled_) AddKnownSum(expected, sum);
  sum_ = std::move(sum);
  return *sum_;
}

absl::Status MappedFile::Check(bool in_use) const {
  FileCalls& calls = FileCalls::Get();
  struct stat info {};
  if (calls.Stat(file_, info) != 0) return Changed(StateOf(info));
  if (StateOf(info) != Expected()) {
    MutexLock lock(sum_mutex_);
    // Its sum is known from before: what it has now decides, unless it changes once more meanwhile.
    const bool settled = WaitUntilSettled(file_, info);
    {
      MutexLock state_lock(mutex_);
      const bool other_names = info.st_nlink != links_;
      if (!sum_ || !settled || !StateOf(info).SameButForChange(state_) ||
          (in_use && !other_names && StateOf(info) != state_)) {
        return Changed(StateOf(info));
      }
    }
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, ComputeSum({}));
    struct stat after {};
    if (sum != *sum_ || calls.Stat(file_, after) != 0 || StateOf(after) != StateOf(info)) {
      return Changed(StateOf(after));
    }
    MutexLock state_lock(mutex_);
    state_ = StateOf(info);
    links_ = info.st_nlink;
  }
  return watch_.broken ? InvalidArgument(path_, ": some of it cannot be read") : absl::OkStatus();
}

void DropMappedPages(const std::byte* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (data != nullptr && begin < end)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace treadle
