// A Treadle server over gRPC as the target of a load.
//
// Thread safety: as LoadTarget; WaitReady is self-contained.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "bench/load/load_replay.h"
#include "server/cli/client_flags.h"

namespace treadle {

// target: host:port. Does not connect yet; GetLimits is the first to fail.
std::unique_ptr<LoadTarget> ConnectToServer(const std::string& target, const ClientAccess& access);

// Waits until the server answers, or the deadline.
absl::Status WaitReady(const std::string& target, const ClientAccess& access,
                       std::chrono::seconds timeout);

}  // namespace treadle
