// The process in which a constraint is tried has nothing of the server's, and does not outlive it.
#include "server/constraint/trial.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/support/in_time.h"

namespace treadle {
namespace {

// Ends the process with 1 if it has a file open beside the standard ones and the folder that is
// listed.
void ExpectStandardFilesAlone() {
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) _exit(1);
  while (const dirent* const entry = readdir(folder)) {
    const int file = std::atoi(entry->d_name);
    if (file > STDERR_FILENO && file != dirfd(folder)) _exit(1);
  }
}

TEST(Trial, ItsProcessHasNoneOfTheServersFiles) {
  const int own = open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int inherited = open("/dev/null", O_RDONLY);
  EXPECT_EQ(InTrial(ExpectStandardFilesAlone, "lists"), absl::OkStatus());
  close(own);
  close(inherited);
}

TEST(Trial, ItsProcessEndsWithTheServer) {
  void* const memory = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto& trial = *new (memory) std::atomic<int>(0);
  const pid_t server = fork();
  if (server == 0) {
    InTrial(
        [&trial] {
          trial = getpid();
          pause();
        },
        "waits")
        .IgnoreError();
    _exit(0);
  }
  ASSERT_GT(server, 0);
  ASSERT_TRUE(ComesTrue([&] { return trial > 0; }));
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  EXPECT_TRUE(ComesTrue([&] {  // gone, or waiting to be collected by whoever inherited it
    std::ifstream file("/proc/" + std::to_string(trial) + "/stat");
    std::string line;
    return !std::getline(file, line) || line[line.rfind(')') + 2] == 'Z';
  }));
  munmap(memory, sizeof(std::atomic<int>));
}

}  // namespace
}  // namespace treadle
