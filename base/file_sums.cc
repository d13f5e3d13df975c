#include "base/file_sums.h"

#include <cstdio>
#include <map>
#include <sstream>

#include "base/mapped_file.h"
#include "base/output_file.h"
#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

constexpr size_t kMaxSums = 1024;  // read from a file

class FileSums {
 public:
  static FileSums& Get() {
    static FileSums& sums = *new FileSums;
    return sums;
  }

  void Keep(const std::string& path) {
    std::string text;
    if (const auto file = MappedFile::Open(path); file.ok()) text = (*file)->text();
    MutexLock lock(mutex_);
    kept_ = path;
    std::istringstream lines(text);
    for (std::string line; sums_.size() < kMaxSums && std::getline(lines, line);) {
      std::istringstream words(line);
      FileState state;
      std::string sum, more;
      if (words >> state.device >> state.inode >> state.bytes >> state.written >> state.changed >>
              sum &&
          sum.size() == 64 && !(words >> more)) {
        sums_[state] = sum;
      }
    }
  }

  std::optional<std::string> Find(const FileState& state) {
    MutexLock lock(mutex_);
    const auto found = sums_.find(state);
    return found == sums_.end() ? std::nullopt : std::optional(found->second);
  }

  void Add(const FileState& state, const std::string& sum) {
    MutexLock lock(mutex_);
    sums_[state] = sum;
    if (kept_.empty()) return;
    std::string text;
    for (const auto& [key, of_key] : sums_) {
      text += Str(key.device, " ", key.inode, " ", key.bytes, " ", key.written, " ", key.changed,
                  " ", of_key, "\n");
    }
    std::remove(kept_.c_str());
    if (auto file = OutputFile::Create(kept_); file.ok() && (*file)->Append(text).ok()) {
      (*file)->Finish().IgnoreError();
    }
  }

 private:
  Mutex mutex_;
  std::string kept_ ABSL_GUARDED_BY(mutex_);
  std::map<FileState, std::string> sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::optional<std::string> KnownSum(const FileState& state) { return FileSums::Get().Find(state); }

void AddKnownSum(const FileState& state, const std::string& sum) {
  FileSums::Get().Add(state, sum);
}

void KeepFileSums(const std::string& path) { FileSums::Get().Keep(path); }

}  // namespace treadle
