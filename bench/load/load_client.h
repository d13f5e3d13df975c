// A Treadle server over gRPC as the target of a load.
//
// Thread safety: as LoadTarget; WaitReady is self-contained.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "bench/load/load_replay.h"

namespace grpc {
class ChannelCredentials;
}

namespace treadle {

struct ServerAccess {
  std::string target;                                          // host:port
  std::shared_ptr<grpc::ChannelCredentials> credentials = {};  // null: plaintext
  std::string authorization = {};  // metadata of every call: "Bearer KEY"; empty: none
};

// Does not connect yet; GetLimits is the first to fail.
std::unique_ptr<LoadTarget> ConnectToServer(const ServerAccess& access);

// Waits until the server answers, or the deadline.
absl::Status WaitReady(const ServerAccess& access, std::chrono::seconds timeout);

}  // namespace treadle
