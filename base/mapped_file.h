// A read-only memory-mapped file. Thread safety: constant after Open.
//
// A file that is cut short while it is mapped, or whose disk fails, does not end the process: what
// cannot be read is zeros from then on, and CheckUnchanged says so. For that, opening the first
// file installs a handler of SIGBUS, which passes on what is not about such a file.
#pragma once

#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

// The identity of a file and its last change: another state of it is another value.
struct FileState {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t written = 0;  // nanoseconds since 1970
  bool operator==(const FileState&) const = default;
};

class MappedFile {
 public:
  // NotFound if there is no such file, InvalidArgument if it is empty or not a regular file,
  // ResourceExhausted if 4096 are open.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }
  const std::string& path() const { return path_; }
  const FileState& state() const { return state_; }  // when it was opened
  // InvalidArgument if it was cut short, written to or unreadable since it was opened: what was
  // read of it counts for nothing.
  absl::Status CheckUnchanged() const;

 private:
  struct Watch;  // what the handler of SIGBUS knows of it
  MappedFile(std::string path, int file, const FileState& state, std::span<const std::byte> bytes,
             Watch& watch)
      : path_(std::move(path)), file_(file), state_(state), bytes_(bytes), watch_(watch) {}
  static Watch* WatchFor(std::span<const std::byte> bytes);
  static void OnBusError(int signal, siginfo_t* info, void* context);

  const std::string path_;
  const int file_;
  const FileState state_;
  const std::span<const std::byte> bytes_;
  Watch& watch_;
};

// Drops this part of a read-only file mapping from the process' memory; touching it again reads the
// file again. Only whole pages go. Must not be given any other kind of memory;
// null is nothing.
void DropMappedPages(const std::byte* data, size_t bytes);

}  // namespace treadle
