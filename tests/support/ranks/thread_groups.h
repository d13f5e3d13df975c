// Joins ranks of this process through its memory by way of a rendezvous, as ranks on GPUs are
// joined by NCCL: thread communicators, handed out by rank 0 to those that find its group.
//
// Thread safety: all methods from any thread.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "engine/stage_ranks.h"
#include "tests/support/ranks/thread_links.h"

namespace treadle {

class ThreadGroups {
 public:
  absl::StatusOr<std::unique_ptr<Communicator>> Join(const RankJoin& join) {
    if (join.rank == 0) {
      MutexLock lock(mutex_);
      const std::string name = Str("group ", groups_.size());
      groups_[name] = CreateThreadLinks(join.size, join.timeout);
      TREADLE_RETURN_IF_ERROR(join.rendezvous.Set("name", name));
      return std::move(groups_[name][0]);
    }
    TREADLE_ASSIGN_OR_RETURN(
        const std::string name,
        join.rendezvous.Get("name", std::chrono::steady_clock::now() + join.timeout));
    MutexLock lock(mutex_);
    return std::move(groups_[name][join.rank]);
  }
  size_t size() {
    MutexLock lock(mutex_);
    return groups_.size();
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::vector<std::unique_ptr<Communicator>>> groups_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
