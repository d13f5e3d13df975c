// Files for the targets that read checkpoints. Thread safety: one thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace treadle {

// A folder for a target's files: in memory where the machine has such a file system, because every
// input is written there. Removed at the end.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }
  // Replaces what is there; returns its path.
  std::string Write(std::string_view name, std::string_view bytes) const;

 private:
  std::string path_;
};

// All of a file that must be there.
std::string ReadWhole(const std::string& path);

// The Hugging Face folders of tests/testdata with weights in one file, always in the same order.
const std::vector<std::string>& TestedModels();

// Opens the checkpoint, reports on it, loads its model and runs a token through it. An error is one
// line, and all that is said is printable.
void UseCheckpoint(const std::string& path);

}  // namespace treadle
