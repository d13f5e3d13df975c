// The system calls with which files are read (mapped_file.h). Tests replace them, to change files
// on disk between any two calls.
//
// Thread safety: any thread, except Replace.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <string>

namespace treadle {

class FileCalls {
 public:
  virtual ~FileCalls() = default;
  // open(2) for reading. A pipe of that name does not block.
  virtual int Open(const std::string& path);
  // fstat(2).
  virtual int Stat(int file, struct stat& info);
  // mmap(2) of the whole file, private and read-only.
  virtual void* Map(int file, size_t bytes);
  // Called before bytes of a mapping are used: parsed, hashed, or copied as a tensor.
  virtual void Use(const std::string& path) {}

  static FileCalls& Get();
  // Null: the system's. REQUIRES: no other thread reads files.
  static void Replace(FileCalls* calls);
};

}  // namespace treadle
