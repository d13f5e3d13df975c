#include "engine/record/record_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/status.h"
#include "engine/record/record.pb.h"

namespace treadle {
namespace {

// The last byte counts formats.
constexpr std::string_view kMagic = "TREADLE\3";
constexpr size_t kFrame = kRecordFrameBytes;
// The largest masks of the largest batch are a fraction of this.
constexpr uint32_t kMaxBytes = 256 << 20;

uint64_t ChecksumOf(std::string_view entry) {
  return Checksum(entry.size(), reinterpret_cast<const std::byte*>(entry.data()), entry.size());
}

}  // namespace

absl::StatusOr<RecordFileWriter> RecordFileWriter::Create(const std::string& path) {
  const auto fail = [&path] {
    return InvalidArgument("recording '", path, "': ", std::strerror(errno),
                           ", expected a file that can be written");
  };
  if (std::rename(path.c_str(), (path + ".1").c_str()) != 0 && errno != ENOENT) return fail();
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return fail();
  RecordFileWriter writer(fd, path);
  TREADLE_RETURN_IF_ERROR(writer.Write(kMagic));
  return writer;
}

RecordFileWriter::RecordFileWriter(RecordFileWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(other.path_), bytes_(other.bytes_) {}

RecordFileWriter& RecordFileWriter::operator=(RecordFileWriter&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

RecordFileWriter::~RecordFileWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::Status RecordFileWriter::Append(std::string_view entry) {
  const auto size = static_cast<uint32_t>(entry.size());
  const uint64_t checksum = ChecksumOf(entry);
  std::string framed(kFrame, '\0');
  std::memcpy(framed.data(), &size, sizeof size);
  std::memcpy(framed.data() + sizeof size, &checksum, sizeof checksum);
  framed += entry;
  return Write(framed);
}

absl::Status RecordFileWriter::Write(std::string_view bytes) {
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t n = write(fd_, bytes.data() + written, bytes.size() - written);
    if (n >= 0) {
      written += static_cast<size_t>(n);
    } else if (errno != EINTR) {
      const absl::Status failed =
          absl::UnavailableError(Str("recording '", path_, "': ", std::strerror(errno)));
      if (ftruncate(fd_, bytes_) == 0) lseek(fd_, bytes_, SEEK_SET);
      return failed;
    }
  }
  bytes_ += static_cast<int64_t>(written);
  return absl::OkStatus();
}

absl::StatusOr<RecordReader> RecordReader::Open(std::string_view bytes) {
  if (!bytes.starts_with(kMagic)) {
    const bool other = bytes.starts_with(kMagic.substr(0, kMagic.size() - 1));
    return InvalidArgument(other ? "a recording of another format" : "no recording",
                           ", expected what this version's serve --record writes");
  }
  RecordReader reader(bytes);
  reader.at_ = kMagic.size();
  return reader;
}

absl::StatusOr<bool> RecordReader::Next(record::Entry& entry) {
  const std::string_view rest = bytes_.substr(at_);
  if (rest.size() < kFrame) return false;
  uint32_t size = 0;
  uint64_t checksum = 0;
  std::memcpy(&size, rest.data(), sizeof size);
  std::memcpy(&checksum, rest.data() + sizeof size, sizeof checksum);
  const auto damaged = [this](const char* what) {
    return InvalidArgument("the recording is damaged at byte ", at_, ": ", what);
  };
  if (size > kMaxBytes) return damaged("an entry of an impossible length");
  if (rest.size() < kFrame + size) return false;
  const std::string_view payload = rest.substr(kFrame, size);
  if (ChecksumOf(payload) != checksum) return damaged("an entry with another checksum");
  if (!entry.ParseFromArray(payload.data(), static_cast<int>(size))) {
    return damaged("an entry that is none");
  }
  at_ += kFrame + size;
  return true;
}

}  // namespace treadle
