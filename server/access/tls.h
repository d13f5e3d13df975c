// TLS of gRPC's servers and channels from files: checked before anything is loaded, taken over
// again when they change (tls_files.h). Connections that stand are never touched. gRPC sees only
// what has passed the checks (certificate_feed.h).
//
// Thread safety: Open and destruction from the owner's thread, the latter after every server and
// channel that uses the credentials is gone.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/access/certificate_feed.h"
#include "server/access/tls_files.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace treadle {

class Tls {
 public:
  static absl::StatusOr<std::unique_ptr<Tls>> Open(const TlsFiles& files, LogSink log);

  // With `ca`, clients must show a certificate from it. Requires a certificate.
  virtual std::shared_ptr<grpc::ServerCredentials> ForServer() const;
  // Verifies the server's name and its certificate, from `ca`. Requires one.
  virtual std::shared_ptr<grpc::ChannelCredentials> ForChannel() const;

 private:
  explicit Tls(const TlsFiles& files) : files_(files) {}

  const TlsFiles files_;
  CertificateFeed feed_;                  // written by the watcher
  std::unique_ptr<FileWatcher> watcher_;  // last
};

}  // namespace treadle
