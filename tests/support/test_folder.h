// A folder of a test's own, under testing::TempDir(); it is removed, with all that is in it, with
// its object. Not thread-safe.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "base/status.h"
#include "tests/support/whole_file.h"

namespace treadle {

class TestFolder {
 public:
  TestFolder() { TREADLE_CHECK(mkdtemp(path_.data()) != nullptr); }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  // The path of a name in it, which need not be there.
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  // Writes a whole file, and gives its path.
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(*this / name, std::ios::binary) << bytes;
    return *this / name;
  }
  // The bytes of a file; "" if it is not there.
  std::string Read(const std::string& name) const { return ReadWhole(*this / name); }
  // A new folder in it.
  std::string Folder(const std::string& name) const {
    std::filesystem::create_directories(*this / name);
    return *this / name;
  }

 private:
  std::string path_ = testing::TempDir() + "treadle-test-XXXXXX";
};

// This process's, removed at its end.
inline const TestFolder& OwnFolder() {
  static const TestFolder folder;
  return folder;
}

}  // namespace treadle
