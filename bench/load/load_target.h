// Servers that a load can be put on, by the protocols that they speak.
//
// Thread safety: as LoadTarget's: any thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/choice.h"
#include "bench/load/load_replay.h"
#include "server/access/client_access.h"

namespace treadle {

enum class LoadProtocol { kGrpc, kOpenAi, kVllmGrpc };
inline constexpr Choice<LoadProtocol> kLoadProtocols[] = {
    {"grpc", LoadProtocol::kGrpc},            // Treadle's
    {"openai", LoadProtocol::kOpenAi},        // /v1/completions, streamed
    {"vllm-grpc", LoadProtocol::kVllmGrpc}};  // the engine protocol of gateways

struct LoadServer {
  LoadProtocol protocol = LoadProtocol::kGrpc;
  std::string target;  // host:port; of OpenAI's API also a URL
  ClientAccess access;
  int32_t vocab = 0;  // of a server that does not say; 0: it must
};
// Does not connect yet; GetLimits is the first to fail. InvalidArgument or NotFound for an address
// that is none.
absl::StatusOr<std::unique_ptr<LoadTarget>> ConnectToServer(const LoadServer& server);

// One for each protocol but gRPC's two, which are ConnectToServer's own.
absl::StatusOr<std::unique_ptr<LoadTarget>> ConnectToOpenAi(const LoadServer& server);

}  // namespace treadle
