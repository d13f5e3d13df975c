#include "server/access/tls.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <utility>

#include "base/status.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(const TlsFiles& files, LogSink log) {
  std::unique_ptr<Tls> tls(new Tls(files));
  TREADLE_ASSIGN_OR_RETURN(
      tls->watcher_,
      WatchTlsFiles(files, std::move(log), [self = tls.get()](const TlsMaterial& material) {
        self->feed_.Set(material);
      }));
  return tls;
}

std::shared_ptr<grpc::ServerCredentials> Tls::ForServer() const {
  TREADLE_CHECK(!files_.key.empty());
  grpc::experimental::TlsServerCredentialsOptions options(feed_.provider());
  options.watch_identity_key_cert_pairs();
  if (files_.ca.empty()) {
    options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  } else {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

std::shared_ptr<grpc::ChannelCredentials> Tls::ForChannel() const {
  TREADLE_CHECK(!files_.ca.empty());
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(feed_.provider());
  options.watch_root_certs();
  if (!files_.key.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace treadle
