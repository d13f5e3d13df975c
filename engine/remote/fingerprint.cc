#include "engine/remote/fingerprint.h"

#include <filesystem>
#include <map>
#include <tuple>

#include "base/sha256.h"
#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

class FileSums {
 public:
  absl::StatusOr<std::string> Of(const std::string& path) {
    std::error_code error;
    const auto written = std::filesystem::last_write_time(path, error);
    const Key key{path, std::filesystem::file_size(path, error), written};
    MutexLock lock(mutex_);
    if (const auto found = sums_.find(key); found != sums_.end()) return found->second;
    TREADLE_ASSIGN_OR_RETURN(std::string sum, FileSha256(path));
    return sums_[key] = std::move(sum);
  }

 private:
  using Key = std::tuple<std::string, uintmax_t, std::filesystem::file_time_type>;
  Mutex mutex_;
  std::map<Key, std::string> sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::string> Fingerprint(const Checkpoint& checkpoint) {
  static FileSums& sums = *new FileSums;
  if (checkpoint.weight_files().size() == 1) return sums.Of(checkpoint.weight_files()[0]);
  Sha256 all;
  all.Add(std::as_bytes(std::span(checkpoint.recipe())));
  for (const std::string& file : checkpoint.weight_files()) {
    TREADLE_ASSIGN_OR_RETURN(const std::string sum, sums.Of(file));
    all.Add(std::as_bytes(std::span(sum)));
  }
  return all.Finish();
}

}  // namespace treadle
