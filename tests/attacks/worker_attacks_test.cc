// Attacks on a worker's control port, by who is no master of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <vector>

#include "base/status.h"
#include "tests/attacks/hostile_client.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/server/cli/child_process.h"
#include "tests/support/ranks/remote_cluster.h"
#include "tests/support/test_folder.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

const char kAttach[] = "/treadle.control.Control/Attach";
constexpr int64_t kOverRestMb = 64;

class WorkerAttacks : public testing::Test {
 protected:
  void Start(const std::string& secret = "", int descriptors = 1024) {
    std::string command = Str("ulimit -n ", descriptors, " && exec ", TREADLE_BINARY,
                              " worker --listen 127.0.0.1:0 --threads 1");
    if (!secret.empty()) {
      command += " --control-secret-file " + OwnFolder().Write("secret", secret + "\n");
    }
    worker_ = std::make_unique<ChildProcess>(std::vector<std::string>{"/bin/sh", "-c", command});
    const std::string before = "listening on 127.0.0.1:";
    port_ = std::atoi(WordAfter(worker_->WaitForLine(before), before).c_str());
    ASSERT_GT(port_, 0) << worker_->output();
    master_.model = *WriteTinyLlamaGguf(OwnFolder().path(), {});
    master_.engine.weights_from_master = true;
    master_.engine.credentials.secret = secret;
    ASSERT_EQ(Honest(), absl::OkStatus());
    memory_ = ResidentMb();
  }
  void TearDown() override {
    EXPECT_EQ(Honest(), absl::OkStatus());
    EXPECT_LT(ResidentMb(), memory_ + kOverRestMb);
    EXPECT_EQ(worker_->Stop(), 0) << worker_->output();
  }
  // A master that loads a stage into the worker, and begins an epoch.
  absl::Status Honest() {
    auto options = EngineOptionsFor(master_, {Str("127.0.0.1:", port_)});
    if (!options.ok()) return options.status();
    return RemoteEngine::Create(*std::move(options)).status();
  }
  int64_t ResidentMb() const {
    std::ifstream file(Str("/proc/", worker_->pid(), "/statm"));
    int64_t total = 0, resident = 0;
    file >> total >> resident;
    return resident * sysconf(_SC_PAGESIZE) >> 20;
  }
  HostileClient& Connect(int patience_seconds = 1) {
    HostileClient& client =
        *clients_.emplace_back(std::make_unique<HostileClient>(port_, patience_seconds));
    EXPECT_TRUE(client.connected());
    return client;
  }

  std::unique_ptr<ChildProcess> worker_;
  int port_ = 0;
  int64_t memory_ = 0;
  ClusterOptions master_;
  std::vector<std::unique_ptr<HostileClient>> clients_;  // stay to the end
};

TEST_F(WorkerAttacks, NothingIsReadOfStrangers) {
  Start("a secret of sixteen");
  for (int i = 0; i < 4; ++i) {
    HostileClient& client = Connect();
    EXPECT_TRUE(client.Greet() && client.Call(1, kAttach));
    EXPECT_THAT(client.ReadUntil("wants proof"), HasSubstr("wants proof of its control secret"));
    client.SendData(1, MessagePrefix(false, 200 << 20) + std::string(32 << 20, 'x'));
  }
}

TEST_F(WorkerAttacks, ALargeFirstMessageIsRefusedByItsLength) {
  Start();
  for (int i = 0; i < 4; ++i) {
    HostileClient& client = Connect();
    EXPECT_TRUE(client.Greet() && client.Call(1, kAttach));
    client.SendData(1, MessagePrefix(false, 200 << 20) + std::string(32 << 20, 'x'));
    EXPECT_THAT(client.ReadUntil("a first message"),
                HasSubstr("a first message of 209715200 bytes, at most 65536 are accepted"));
  }
  EXPECT_LT(ResidentMb(), memory_ + kOverRestMb);
}

TEST_F(WorkerAttacks, AHeaderBlockWithoutEndIsCutOff) {
  Start("a secret of sixteen");
  for (int i = 0; i < 4; ++i) {
    HostileClient& client = Connect();
    EXPECT_TRUE(client.Greet() && client.Send(Http2Frame(1, 0, 1, CallHeaders(kAttach))));
    const std::string more = Http2Frame(9, 0, 1, std::string(16000, 'x'));
    int64_t sent = 0;
    while (sent < 64 << 20 && client.Send(more)) sent += static_cast<int64_t>(more.size());
    EXPECT_LT(sent, 16 << 20);
  }
}

TEST_F(WorkerAttacks, IdleConnectionsDoNotKeepAMasterOut) {
  Start("", /*descriptors=*/128);
  for (int i = 0; i < 300; ++i) {
    HostileClient& client = Connect();
    if (i % 2 == 0) client.Greet();  // half of them say hello, and nothing more
  }
  EXPECT_EQ(Honest(), absl::OkStatus());
  clients_.clear();
}

}  // namespace
}  // namespace treadle
