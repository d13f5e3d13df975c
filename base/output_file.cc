#include "base/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;

// Beside `path`, so that a rename moves nothing.
std::string TemporaryName(const fs::path& path) {
  return (path.parent_path() / Str(".", path.filename().string(), ".partial-", getpid())).string();
}

// Without a trailing slash.
fs::path Normal(const std::string& path) {
  const fs::path normal = fs::path(path).lexically_normal();
  return normal.filename().empty() ? normal.parent_path() : normal;
}

// The entries of a folder, after files in it were renamed.
void SyncFolder(const fs::path& path) {
  const int folder = open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  fsync(folder);
  close(folder);
}

absl::Status Rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) == 0) {
    SyncFolder(fs::path(to).parent_path());
    return absl::OkStatus();
  }
  return Internal(to, ": cannot be put in place: ", std::strerror(errno));
}

}  // namespace

absl::StatusOr<std::unique_ptr<OutputFile>> OutputFile::Create(const std::string& path) {
  std::error_code error;
  if (fs::exists(path, error)) {
    return InvalidArgument(path, ": is there already, expected a new file");
  }
  const std::string temporary = TemporaryName(path);
  const int file = open(temporary.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return InvalidArgument(path, ": cannot be written: ", std::strerror(errno));
  return std::unique_ptr<OutputFile>(new OutputFile(path, temporary, file));
}

OutputFile::~OutputFile() {
  if (file_ < 0) return;
  close(file_);
  unlink(temporary_.c_str());
}

absl::Status OutputFile::Error(const char* what) const {
  return Internal(path_, ": ", what, ": ", std::strerror(errno));
}

absl::Status OutputFile::WriteAt(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return Error("cannot be written");
    offset += static_cast<uint64_t>(written);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status OutputFile::Append(std::span<const std::byte> bytes) {
  TREADLE_RETURN_IF_ERROR(WriteAt(size_, bytes));
  size_ += bytes.size();
  return absl::OkStatus();
}

absl::Status OutputFile::Append(std::string_view text) {
  return Append(std::as_bytes(std::span(text.data(), text.size())));
}

absl::Status OutputFile::PadTo(uint64_t alignment) {
  return Append(std::string((alignment - size_ % alignment) % alignment, '\0'));
}

absl::Status OutputFile::Overwrite(uint64_t offset, std::string_view text) {
  TREADLE_CHECK(offset + text.size() <= size_);
  return WriteAt(offset, std::as_bytes(std::span(text.data(), text.size())));
}

absl::Status OutputFile::Finish() {
  if (fsync(file_) != 0) return Error("cannot be flushed to disk");
  const int closed = close(std::exchange(file_, -1));
  absl::Status status = closed == 0 ? Rename(temporary_, path_) : Error("cannot be closed");
  if (!status.ok()) unlink(temporary_.c_str());
  return status;
}

absl::StatusOr<std::unique_ptr<OutputFolder>> OutputFolder::Create(const std::string& path) {
  const std::string normal = Normal(path).string();
  std::error_code error;
  if (fs::exists(normal, error) &&
      !(fs::is_directory(normal, error) && fs::is_empty(normal, error))) {
    return InvalidArgument(path, ": is there already, expected a new folder");
  }
  const std::string temporary = TemporaryName(normal);
  if (!fs::create_directory(temporary, error)) {
    return InvalidArgument(
        path, ": cannot be made: ", error ? error.message() : "an unfinished one is in the way");
  }
  return std::unique_ptr<OutputFolder>(new OutputFolder(normal, temporary));
}

OutputFolder::~OutputFolder() {
  std::error_code error;
  if (!finished_) fs::remove_all(temporary_, error);
}

absl::Status OutputFolder::Write(const std::string& name, std::string_view text) const {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<OutputFile> file, OutputFile::Create(Path(name)));
  TREADLE_RETURN_IF_ERROR(file->Append(text));
  return file->Finish();
}

absl::Status OutputFolder::Finish() {
  SyncFolder(temporary_);
  TREADLE_RETURN_IF_ERROR(Rename(temporary_, path_));
  finished_ = true;
  return absl::OkStatus();
}

}  // namespace treadle
