// A read-only memory-mapped file. Thread safety: constant after Open.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

class MappedFile {
 public:
  // NotFound if there is no such file, InvalidArgument if it is empty or not a regular file.
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, std::span<const std::byte> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  const std::string path_;
  const std::span<const std::byte> bytes_;
};

// Drops this part of a read-only file mapping from the process' memory; touching it again reads the
// file again. Only whole pages go. Must not be given any other kind of memory.
void DropMappedPages(const std::byte* data, size_t bytes);

}  // namespace treadle
