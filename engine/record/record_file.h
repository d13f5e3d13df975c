// A recording's file: a magic number, then entries, each with its length (4 bytes) and a checksum
// (8 bytes) in front, little-endian.
//
// A file begins with a header and, if sequences live there, with all that is needed to rebuild
// their K/V, so that it replays without the one before. A server that was killed leaves an entry
// that is not whole at the end; what differs anywhere else is damage.
//
// Thread safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

namespace record {
class Entry;
}  // namespace record

// One generation of a recording, being written. It belongs to its owner alone (mode 0600): tokens
// can be turned into text.
class RecordFileWriter {
 public:
  // A file that is there already becomes `path`.1, in the place of the one that has this name.
  // InvalidArgument names the file.
  static absl::StatusOr<RecordFileWriter> Create(const std::string& path);
  RecordFileWriter(RecordFileWriter&& other) noexcept;
  RecordFileWriter& operator=(RecordFileWriter&& other) noexcept;
  ~RecordFileWriter();

  // A serialized entry. Unavailable, and the file ends with the entry before, if it cannot be
  // written.
  absl::Status Append(std::string_view entry);
  int64_t bytes() const { return bytes_; }

 private:
  RecordFileWriter(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  absl::Status Write(std::string_view bytes);

  int fd_;
  std::string path_;
  int64_t bytes_ = 0;
};

// The bytes that one entry adds to a file, at most.
inline constexpr int64_t kRecordFrameBytes = 12;

class RecordReader {
 public:
  // `bytes` outlive the reader. InvalidArgument: they are no recording, or one of another format.
  static absl::StatusOr<RecordReader> Open(std::string_view bytes);

  // False at the end. InvalidArgument names the byte at which the file is damaged.
  absl::StatusOr<bool> Next(record::Entry& entry);
  // Once Next was false: bytes of an entry that is not whole.
  size_t cut_off() const { return bytes_.size() - at_; }

 private:
  explicit RecordReader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace treadle
