// TLS of sockets that we serve ourselves (gRPC's: tls.h). A pair of key and certificate that
// changes is taken over as one, by connections that begin afterwards.
//
// Thread safety: NewSession from any thread.
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/access/tls_files.h"

struct ssl_st;  // OpenSSL's SSL

namespace treadle {

struct FreeTlsSession {
  void operator()(ssl_st* session) const;
};
using TlsSession = std::unique_ptr<ssl_st, FreeTlsSession>;

class SocketTls {
 public:
  // Requires a certificate; with `ca`, clients must show one from it. `protocol` is agreed on with
  // clients that offer some (ALPN, RFC 7301): a literal, "h2" or "http/1.1".
  static absl::StatusOr<std::unique_ptr<SocketTls>> Open(const TlsFiles& files,
                                                         std::string_view protocol, LogSink log);

  // The server's side of a connection on the non-blocking socket `fd`, which it does not own. Null
  // without memory.
  TlsSession NewSession(int fd) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit SocketTls(std::string_view protocol) : protocol_(protocol) {}
  void Set(std::shared_ptr<ssl_ctx_st> context) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::string_view protocol_;
  mutable Mutex mutex_;
  std::shared_ptr<ssl_ctx_st> context_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<FileWatcher> watcher_;  // last
};

}  // namespace treadle
