// TLS of gRPC's channels from files: checked before anything is loaded, taken over again when they
// change (tls_files.h). Connections that stand are never touched.
//
// Thread safety: Open and destruction from the owner's thread, the latter after every channel that
// uses the credentials is gone.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/access/tls_files.h"

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace treadle {

class Tls {
 public:
  static absl::StatusOr<std::unique_ptr<Tls>> Open(const TlsFiles& files, LogSink log);
  ~Tls();

  // Verifies the server's name and its certificate, from `ca`. Requires one.
  std::shared_ptr<grpc::ChannelCredentials> ForChannel() const;

 private:
  class CertificateFeed;
  explicit Tls(const TlsFiles& files);

  const TlsFiles files_;
  const std::unique_ptr<CertificateFeed> feed_;  // written by the watcher
  std::unique_ptr<FileWatcher> watcher_;         // last
};

}  // namespace treadle
