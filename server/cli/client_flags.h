// How a client reaches a server: TLS and API key, the same flags wherever --target is.
//
// Thread safety: pure, but for the files.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "server/access/client_access.h"
#include "server/access/tls_files.h"

namespace CLI {
class App;
}

namespace treadle {

struct ClientFlags {
  TlsFiles tls;  // ca empty: plaintext
  std::string api_key_file;
};
void AddClientFlags(CLI::App& app, ClientFlags& flags);

// Reads and checks the files; errors name file and reason.
absl::StatusOr<ClientAccess> OpenAccess(const ClientFlags& flags);

}  // namespace treadle
