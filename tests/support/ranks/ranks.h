// Ranks for tests: as threads or as processes of this machine, and how they find each other.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/sync.h"
#include "kernels/collectives/rendezvous.h"

namespace treadle {

// Between processes: one file per key in a folder, looked for every few milliseconds. Thread-safe.
class FolderRendezvous final : public Rendezvous {
 public:
  explicit FolderRendezvous(std::filesystem::path folder);
  absl::Status Set(const std::string& key, const std::string& bytes) override;
  absl::StatusOr<std::string> Get(const std::string& key,
                                  std::chrono::steady_clock::time_point deadline) override;
  absl::Status status() override { return absl::OkStatus(); }

 private:
  std::filesystem::path PathOf(const std::string& key) const;

  const std::filesystem::path folder_;
};

// A new folder for the processes of one test, removed with what lies in it.
class RendezvousFolder {
 public:
  RendezvousFolder();
  ~RendezvousFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Runs rank(i) for i < ranks on a thread each and waits for all.
void RunRankThreads(int ranks, const std::function<void(int)>& rank);

// Runs rank(i) in a forked process each; a process' exit code is 0 if it returned true. Each has a
// minute to live. Fork before this process has threads.
class RankProcesses {
 public:
  RankProcesses(int ranks, const std::function<bool(int)>& rank);
  ~RankProcesses();  // kills those that were not waited for

  // 0: returned true; 1: false; 256 + signal: was ended by it.
  int Wait(int rank);

 private:
  std::vector<pid_t> processes_;  // -1: waited for
};

}  // namespace treadle
