// Files and folders that appear under their name only when they are complete: written under a
// temporary name beside it, flushed to disk, renamed. An unfinished file is removed.
//
// Errors name the path and the system's reason. Thread safety: confined to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

class OutputFile {
 public:
  // An error if there is such a file already.
  static absl::StatusOr<std::unique_ptr<OutputFile>> Create(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  absl::Status Append(std::span<const std::byte> bytes);
  absl::Status Append(std::string_view text);
  // Zeros up to a multiple of `alignment`.
  absl::Status PadTo(uint64_t alignment);
  // Bytes that have been written already.
  absl::Status Overwrite(uint64_t offset, std::string_view text);
  uint64_t size() const { return size_; }

  // Once; nothing may be written afterwards.
  absl::Status Finish();

 private:
  OutputFile(std::string path, std::string temporary, int file)
      : path_(std::move(path)), temporary_(std::move(temporary)), file_(file) {}
  absl::Status WriteAt(uint64_t offset, std::span<const std::byte> bytes);
  absl::Status Error(const char* what) const;

  const std::string path_;
  const std::string temporary_;
  int file_;  // -1: finished
  uint64_t size_ = 0;
};

class OutputFolder {
 public:
  // An error if there is such a folder already, and it is not empty.
  static absl::StatusOr<std::unique_ptr<OutputFolder>> Create(const std::string& path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  // Where to write a file of the folder.
  std::string Path(const std::string& name) const { return temporary_ + "/" + name; }
  absl::Status Write(const std::string& name, std::string_view text) const;

  absl::Status Finish();

 private:
  OutputFolder(std::string path, std::string temporary)
      : path_(std::move(path)), temporary_(std::move(temporary)) {}

  const std::string path_;
  const std::string temporary_;
  bool finished_ = false;
};

}  // namespace treadle
