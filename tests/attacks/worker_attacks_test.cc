// Attacks on a worker's control port, by who does not know its secret.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <vector>

#include "base/status.h"
#include "tests/attacks/hostile_client.h"
#include "tests/server/cli/child_process.h"

namespace treadle {
namespace {

using testing::HasSubstr;

const char kAttach[] = "/treadle.control.Control/Attach";

int64_t ResidentMb(int pid) {
  std::ifstream status(Str("/proc/", pid, "/status"));
  for (std::string word; status >> word;) {
    if (word != "VmRSS:") continue;
    int64_t kilobytes = 0;
    status >> kilobytes;
    return kilobytes / 1024;
  }
  return -1;
}

TEST(WorkerAttacks, NothingIsReadOfStrangers) {
  const std::string secret = Str(testing::TempDir(), "/worker-secret-", getpid());
  std::ofstream(secret) << "a secret of sixteen\n";
  ChildProcess worker({TREADLE_BINARY, "worker", "--listen", "127.0.0.1:0", "--threads", "1",
                       "--control-secret-file", secret});
  const std::string before = "listening on 127.0.0.1:";
  const std::string line = worker.WaitForLine(before);
  ASSERT_NE(line, "") << worker.output();
  const int port = std::atoi(line.c_str() + line.find(before) + before.size());
  const int64_t memory = ResidentMb(worker.pid());
  std::vector<std::unique_ptr<HostileClient>> clients;
  for (int i = 0; i < 8; ++i) {
    HostileClient& client = *clients.emplace_back(std::make_unique<HostileClient>(port, 1));
    ASSERT_TRUE(client.connected() && client.Greet());
    EXPECT_TRUE(client.Call(1, kAttach));
    client.SendData(1, MessagePrefix(false, 200 << 20) + std::string(32 << 20, 'x'));
    EXPECT_THAT(client.ReadUntil("wants proof"), HasSubstr("wants proof of its control secret"));
  }
  EXPECT_LT(ResidentMb(worker.pid()), memory + 64);
  worker.Signal(SIGTERM);
  EXPECT_EQ(worker.Wait(), 0) << worker.output();
}

}  // namespace
}  // namespace treadle
