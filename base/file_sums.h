// SHA-256 sums of files that did not change: the sum of a file in a known state is computed once.
//
// Thread safety: any thread.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>

namespace treadle {

// Identifies a file and the version of its bytes. A writer can set the time of writing back, but
// not the time of change.
struct FileState {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t written = 0;  // mtime, in nanoseconds since 1970
  int64_t changed = 0;  // ctime: of the last change to the bytes, the attributes or the names
  auto operator<=>(const FileState&) const = default;
  // True if only the time of change differs, as after chmod, a new link, or a file renamed over it.
  bool SameButForChange(const FileState& other) const {
    return device == other.device && inode == other.inode && bytes == other.bytes &&
           written == other.written;
  }
};

// The sum of a file that is in this state, if it is known: 64 hexadecimal digits.
std::optional<std::string> KnownSum(const FileState& state);
void AddKnownSum(const FileState& state, const std::string& sum);

// Reads known sums from `path`, and writes them there from now on, for the next process. If the
// file cannot be read or written, sums are computed again.
void KeepFileSums(const std::string& path);

}  // namespace treadle
