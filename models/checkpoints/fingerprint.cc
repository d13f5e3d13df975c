#include "models/checkpoints/fingerprint.h"

#include <sys/stat.h>

#include <compare>
#include <cstdio>
#include <fstream>
#include <map>
#include <span>
#include <sstream>
#include <utility>
#include <vector>

#include "base/output_file.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

constexpr size_t kMaxSums = 1024;  // that are read from a file

// A file and the last change of its bytes or of its inode: a time of writing can be set back.
struct FileKey {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t written = 0;  // nanoseconds since 1970
  int64_t changed = 0;
  auto operator<=>(const FileKey&) const = default;
};

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileKey KeyOf(const std::string& path) {
  struct stat now = {};
  if (stat(path.c_str(), &now) != 0) return {};
  return {now.st_dev, now.st_ino, static_cast<uint64_t>(now.st_size), Nanoseconds(now.st_mtim),
          Nanoseconds(now.st_ctim)};
}

class FileSums {
 public:
  static FileSums& Get() {
    static FileSums& sums = *new FileSums;
    return sums;
  }

  void Keep(const std::string& path) {
    MutexLock lock(mutex_);
    kept_ = path;
    std::ifstream file(path);
    for (std::string line; sums_.size() < kMaxSums && std::getline(file, line);) {
      std::istringstream words(line);
      FileKey key;
      std::string sum, more;
      if (words >> key.device >> key.inode >> key.bytes >> key.written >> key.changed >> sum &&
          sum.size() == 64 && !(words >> more)) {
        sums_[key] = sum;
      }
    }
  }

  absl::StatusOr<std::string> Of(const std::string& path, FileState* state) {
    const FileKey key = KeyOf(path);
    if (state != nullptr) *state = {key.device, key.inode, key.bytes, key.written};
    MutexLock lock(mutex_);
    if (const auto found = sums_.find(key); found != sums_.end()) return found->second;
    TREADLE_ASSIGN_OR_RETURN(std::string sum, FileSha256(path, state));
    if (KeyOf(path) != key) return sum;  // it was changed or replaced meanwhile
    sums_[key] = sum;
    Write();
    return sum;
  }

 private:
  void Write() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (kept_.empty()) return;
    std::string text;
    for (const auto& [key, sum] : sums_) {
      text += Str(key.device, " ", key.inode, " ", key.bytes, " ", key.written, " ", key.changed,
                  " ", sum, "\n");
    }
    std::remove(kept_.c_str());
    if (auto file = OutputFile::Create(kept_); file.ok() && (*file)->Append(text).ok()) {
      (*file)->Finish().IgnoreError();
    }
  }

  Mutex mutex_;
  std::string kept_ ABSL_GUARDED_BY(mutex_);
  std::map<FileKey, std::string> sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::string> FileSum(const std::string& path, FileState* state) {
  return FileSums::Get().Of(path, state);
}

void KeepFileSums(const std::string& path) { FileSums::Get().Keep(path); }

absl::StatusOr<std::string> Fingerprint(const Checkpoint& checkpoint) {
  Sha256 all;
  all.Add(std::as_bytes(std::span(checkpoint.recipe())));
  if (checkpoint.kind() == Checkpoint::Kind::kHuggingFace) {
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, FileSum(checkpoint.path() + "/config.json"));
    all.Add(std::as_bytes(std::span(sum)));
  }
  const std::vector<FileState> opened = checkpoint.file_states();
  for (size_t i = 0; i < checkpoint.weight_files().size(); ++i) {
    const std::string& file = checkpoint.weight_files()[i];
    FileState state;
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, FileSum(file, &state));
    if (i < opened.size() && state != opened[i]) {
      return InvalidArgument(file,
                             " was replaced or written to after it was opened, expected it to ",
                             "stay as it is until it is loaded");
    }
    const bool only = checkpoint.weight_files().size() == 1;
    if (only && checkpoint.kind() == Checkpoint::Kind::kGguf) return sum;
    all.Add(std::as_bytes(std::span(sum)));
  }
  return all.Finish();
}

std::string MachineId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::string FilesHere(const Checkpoint& checkpoint) {
  const std::vector<FileState> states = checkpoint.file_states();
  if (states.empty()) return "";
  std::string text = MachineId();
  for (const FileState& state : states) {
    text += Str(" ", state.device, ":", state.inode, ":", state.bytes, ":", state.written);
  }
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(text)));
  return sum.Finish();
}

}  // namespace treadle
