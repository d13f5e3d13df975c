#include "server/cli/client_flags.h"

#include <grpcpp/security/credentials.h>

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "server/access/api_keys.h"

namespace treadle {

void AddClientFlags(CLI::App& app, ClientFlags& flags) {
  CLI::Option* ca = app.add_option("--tls-ca", flags.tls.ca,
                                   "talk TLS to a server with a certificate from this PEM file");
  CLI::Option* cert = app.add_option("--tls-cert", flags.tls.certificate,
                                     "own certificate, for a server that wants one");
  cert->needs(ca);
  app.add_option("--tls-key", flags.tls.key, "its private key")->needs(cert);
  app.add_option("--api-key-file", flags.api_key_file, "file whose first word is the API key");
}

absl::StatusOr<ClientAccess> OpenAccess(const ClientFlags& flags) {
  ClientAccess access{.credentials = grpc::InsecureChannelCredentials(), .authorization = {}};
  if (!flags.tls.empty()) {
    TREADLE_ASSIGN_OR_RETURN(const TlsMaterial material, ReadTlsFiles(flags.tls));
    access.credentials = grpc::SslCredentials({material.ca, material.key, material.certificate});
    access.tls = material.client;
  }
  if (!flags.api_key_file.empty()) {
    TREADLE_ASSIGN_OR_RETURN(const std::string key, ReadFirstKey(flags.api_key_file));
    access.authorization = "Bearer " + key;
  }
  return access;
}

}  // namespace treadle
