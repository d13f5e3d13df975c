// A read-only memory-mapped file: its bytes, and what they are identified by. A model's
// fingerprint, an adapter's hash and the parsers of configurations all take the same object, so
// that what is named is what was read: a path may lead to another file a moment later.
//
// A file that is cut short while it is mapped, or whose disk fails, does not end the process: what
// cannot be read is zeros from then on, and CheckUnchanged says so. For that, opening the first
// file installs a handler of SIGBUS, which passes on what is not about such a file.
//
// Bytes are taken for unchanged while the file's FileState is. The kernel stamps changes with a
// clock that ticks every few milliseconds, and two changes within a tick leave equal times; so Open
// waits until the last change is at least a tick old. Writes through another process's shared
// mapping are not noticed.
//
// Thread safety: any thread.
#pragma once

#include <signal.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "base/file_sums.h"
#include "base/sync.h"

namespace treadle {

class MappedFile {
 public:
  // NotFound if there is no such file, InvalidArgument if it is empty or not a regular file,
  // ResourceExhausted if 4096 are open; PermissionDenied and others, as the system says.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }
  const std::string& path() const { return path_; }
  // The state in which the file has these bytes. Nothing if the file's clock is ahead of this
  // machine's, so that the state cannot tell whether it changes.
  std::optional<FileState> state() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether its path still leads to this file, in the same state: opening it again would give the
  // same bytes.
  bool IsAtItsPath() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The SHA-256 of the bytes, 64 hexadecimal digits; computed once. `cancelled` is asked often; may
  // be empty. Errors: CheckUnchanged's; Cancelled.
  absl::StatusOr<std::string> Sum(const std::function<bool()>& cancelled = {}) const
      ABSL_LOCKS_EXCLUDED(sum_mutex_, mutex_);
  // Call it after using the bytes. InvalidArgument if they may have changed since Open: the file
  // was written to, cut short, or cannot be read. A file renamed over the path, or a new link, is
  // no error if Sum is known and the bytes still have it.
  absl::Status CheckUnchanged() const ABSL_LOCKS_EXCLUDED(sum_mutex_, mutex_) {
    return Check(/*in_use=*/true);
  }
  // Call it before using the bytes again after a while. As CheckUnchanged, but a change of
  // attributes is no error either. (While bytes are used it is, because a copy that sets the time
  // of writing back looks the same, and another such copy can restore the bytes.)
  absl::Status Revalidate() const ABSL_LOCKS_EXCLUDED(sum_mutex_, mutex_) {
    return Check(/*in_use=*/false);
  }

 private:
  struct Watch;  // what the handler of SIGBUS knows of it
  MappedFile(std::string path, int file, const FileState& state, uint64_t links, bool settled,
             std::span<const std::byte> bytes, Watch& watch)
      : path_(std::move(path)),
        file_(file),
        settled_(settled),
        bytes_(bytes),
        watch_(watch),
        state_(state),
        links_(links) {}
  static Watch* WatchFor(std::span<const std::byte> bytes);
  static void OnBusError(int signal, siginfo_t* info, void* context);

  FileState Expected() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<std::string> ComputeSum(const std::function<bool()>& cancelled) const;
  absl::Status Check(bool in_use) const ABSL_LOCKS_EXCLUDED(sum_mutex_, mutex_);
  absl::Status Changed(const FileState& now) const;

  const std::string path_;
  const int file_;
  const bool settled_;  // the last change was at least a tick old when the file was opened
  const std::span<const std::byte> bytes_;
  Watch& watch_;

  mutable Mutex sum_mutex_;  // held while the sum is computed; taken before mutex_
  mutable std::optional<std::string> sum_ ABSL_GUARDED_BY(sum_mutex_);
  mutable Mutex mutex_;
  mutable FileState state_ ABSL_GUARDED_BY(mutex_);
  mutable uint64_t links_ ABSL_GUARDED_BY(mutex_);  // names that the file had in that state
};

// Drops this part of a read-only file mapping from the process' memory; touching it again reads the
// file again. Only whole pages go. Must not be given any other kind of memory;
// null is nothing.
void DropMappedPages(const std::byte* data, size_t bytes);

}  // namespace treadle
