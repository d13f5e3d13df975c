#include "tests/support/ranks/ranks.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

absl::Status Absent(const std::string& key) {
  return absl::DeadlineExceededError(Str("nobody set ", key));
}

}  // namespace

FolderRendezvous::FolderRendezvous(std::filesystem::path folder) : folder_(std::move(folder)) {
  std::filesystem::create_directories(folder_);
}

std::filesystem::path FolderRendezvous::PathOf(const std::string& key) const {
  std::string name = key;
  std::replace(name.begin(), name.end(), '/', '_');
  return folder_ / name;
}

absl::Status FolderRendezvous::Set(const std::string& key, const std::string& bytes) {
  const std::filesystem::path unfinished = PathOf(key).string() + ".part";
  std::ofstream(unfinished, std::ios::binary) << bytes;
  std::error_code error;
  std::filesystem::rename(unfinished, PathOf(key), error);
  return error ? Internal("cannot set ", key, ": ", error.message()) : absl::OkStatus();
}

absl::StatusOr<std::string> FolderRendezvous::Get(const std::string& key,
                                                  Clock::time_point deadline) {
  while (!std::filesystem::exists(PathOf(key))) {
    if (Clock::now() >= deadline) return Absent(key);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  std::ostringstream bytes;
  bytes << std::ifstream(PathOf(key), std::ios::binary).rdbuf();
  return std::move(bytes).str();
}

RendezvousFolder::RendezvousFolder() {
  std::string pattern = std::filesystem::temp_directory_path() / "treadle-rendezvous-XXXXXX";
  TREADLE_CHECK(mkdtemp(pattern.data()) != nullptr);
  path_ = pattern;
}

RendezvousFolder::~RendezvousFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void RunRankThreads(int ranks, const std::function<void(int)>& rank) {
  std::vector<std::thread> threads;
  threads.reserve(ranks);
  for (int i = 0; i < ranks; ++i) threads.emplace_back(rank, i);
  for (std::thread& thread : threads) thread.join();
}

RankProcesses::RankProcesses(int ranks, const std::function<bool(int)>& rank) {
  std::fflush(nullptr);
  for (int i = 0; i < ranks; ++i) {
    const pid_t process = fork();
    if (process == 0) {
      alarm(60);
      const bool good = rank(i);
      std::fflush(nullptr);
      _exit(good ? 0 : 1);
    }
    TREADLE_CHECK(process > 0);
    processes_.push_back(process);
  }
}

RankProcesses::~RankProcesses() {
  for (size_t rank = 0; rank < processes_.size(); ++rank) {
    if (processes_[rank] < 0) continue;
    kill(processes_[rank], SIGKILL);
    Wait(static_cast<int>(rank));
  }
}

int RankProcesses::Wait(int rank) {
  int state = 0;
  TREADLE_CHECK(waitpid(processes_[rank], &state, 0) == processes_[rank]);
  processes_[rank] = -1;
  return WIFEXITED(state) ? WEXITSTATUS(state) : 256 + WTERMSIG(state);
}

}  // namespace treadle
