// build/treadle serving a tiny model in a process of its own, under limits, with honest clients
// beside the hostile ones. Not thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/grpc/inference.grpc.pb.h"
#include "tests/server/cli/child_process.h"

namespace treadle {

class AttackedServer {
 public:
  struct Limits {
    int64_t descriptors = 0;  // ulimit -n; 0: as it is
    int64_t memory_mb = 0;    // ulimit -v; 0: none. Sanitizers need all addresses: never with them
    std::string before = {};  // what the shell does before the server begins
    bool serves = true;       // false: it is not waited for
  };

  // `model`: empty for a tiny one.
  AttackedServer(const std::vector<std::string>& flags, const Limits& limits,
                 const std::string& model = "");

  ChildProcess& process() { return *process_; }
  int port() const { return port_; }  // gRPC's
  int http_port() const { return http_port_; }
  bool alive();
  // One short call on a connection of its own, again while the server is too busy, for a minute: no
  // attack holds it up for ever.
  grpc::Status Honest();
  // Whether the probe `live` says that it serves, on a connection of its own.
  bool Live();
  // `through`: the port of a proxy; 0: the server's own.
  std::shared_ptr<grpc::Channel> Connect(int through = 0) const;

  int64_t memory_bytes() const;  // resident
  int64_t memory_mb() const { return memory_bytes() >> 20; }
  int64_t peak_memory_mb() const;  // resident, since the process began
  int64_t descriptors() const;
  // Waits for at most half a minute until it has as few as `count`.
  bool WaitDescriptors(int64_t count) const;

 private:
  std::unique_ptr<ChildProcess> process_;
  int port_ = 0, http_port_ = 0;
};

// A server that may take 1.8 GB of addresses. After each test it stands, answers its clients and
// its probe, and memory and descriptors are back.
class AttackTest : public testing::Test {
 protected:
  void Start(const std::vector<std::string>& flags = {}, int64_t descriptors = 0);
  void ExpectService();
  void ExpectLittleMemory() { EXPECT_LT(server_->memory_mb(), memory_ + 256); }
  void TearDown() override;

  std::unique_ptr<AttackedServer> server_;
  int64_t memory_ = 0, descriptors_ = 0;  // of the server at rest
};

}  // namespace treadle
