// How a client reaches a server: TLS and API key, the same flags wherever --target is.
//
// Thread safety: pure, but for the files.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/access/tls.h"

namespace CLI {
class App;
}

namespace treadle {

struct ClientFlags {
  TlsFiles tls;  // ca empty: plaintext
  std::string api_key_file;
};
void AddClientFlags(CLI::App& app, ClientFlags& flags);

struct ClientAccess {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string authorization;  // of every call; empty: none
};
// Reads and checks the files; errors name file and reason.
absl::StatusOr<ClientAccess> OpenAccess(const ClientFlags& flags);

}  // namespace treadle
