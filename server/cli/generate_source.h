// Where `generate` gets its answer from: a server, or a model in this process. Both give the same
// messages as GenerateStream does.
//
// Thread safety: blocking calls; the callback runs on one thread, which may be another one.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "server/cli/client_flags.h"
#include "server/configuration.h"

namespace treadle::v1 {
class GenerateRequest;
class GenerateResponse;
}  // namespace treadle::v1

namespace treadle {

using OnResponse = std::function<void(const v1::GenerateResponse&)>;

// `timeout` 0: no deadline.
absl::Status GenerateFromServer(const std::string& target, const ClientAccess& access,
                                std::chrono::milliseconds timeout,
                                const v1::GenerateRequest& request, const OnResponse& on_response);
absl::Status GenerateInProcess(const ServeOptions& options, std::chrono::milliseconds timeout,
                               const v1::GenerateRequest& request, const OnResponse& on_response);

}  // namespace treadle
