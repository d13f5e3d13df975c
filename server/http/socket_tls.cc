#include "server/http/socket_tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <utility>

#include "base/status.h"

namespace treadle {

void FreeTlsSession::operator()(ssl_st* session) const { SSL_free(session); }

absl::StatusOr<std::unique_ptr<SocketTls>> SocketTls::Open(const TlsFiles& files, LogSink log) {
  TREADLE_CHECK(!files.key.empty());
  std::unique_ptr<SocketTls> tls(new SocketTls);
  TREADLE_ASSIGN_OR_RETURN(
      tls->watcher_,
      WatchTlsFiles(files, std::move(log), [self = tls.get()](const TlsMaterial& material) {
        self->Set(material.server);
      }));
  return tls;
}

void SocketTls::Set(std::shared_ptr<ssl_ctx_st> context) {
  MutexLock lock(mutex_);
  context_ = std::move(context);
}

TlsSession SocketTls::NewSession(int fd) const {
  std::shared_ptr<ssl_ctx_st> context;
  {
    MutexLock lock(mutex_);
    context = context_;
  }
  TlsSession session(SSL_new(context.get()));
  if (!session || SSL_set_fd(session.get(), fd) != 1) {
    ERR_clear_error();
    return nullptr;
  }
  SSL_set_accept_state(session.get());
  // One record for each read, so that a client that sends many keeps the thread for one at a time.
  SSL_clear_mode(session.get(), SSL_MODE_AUTO_RETRY);
  return session;
}

}  // namespace treadle
