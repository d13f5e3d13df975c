#include "server/http/socket_tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <utility>

#include "base/status.h"

namespace treadle {

void FreeTlsSession::operator()(ssl_st* session) const { SSL_free(session); }

absl::StatusOr<std::unique_ptr<SocketTls>> SocketTls::Open(const TlsFiles& files,
                                                           std::string_view protocol, LogSink log) {
  TREADLE_CHECK(!files.key.empty());
  std::unique_ptr<SocketTls> tls(new SocketTls(protocol));
  TREADLE_ASSIGN_OR_RETURN(
      tls->watcher_,
      WatchTlsFiles(files, std::move(log), [self = tls.get()](const TlsMaterial& material) {
        self->Set(material.server);
      }));
  return tls;
}

void SocketTls::Set(std::shared_ptr<ssl_ctx_st> context) {
  const auto choose = [](SSL*, const unsigned char** chosen, unsigned char* length,
                         const unsigned char* offered, unsigned int size, void* protocol) {
    const auto& wanted = *static_cast<const std::string_view*>(protocol);
    for (unsigned int at = 0; at < size; at += 1u + offered[at]) {  // OpenSSL has checked the list
      if (std::string_view(reinterpret_cast<const char*>(offered) + at + 1, offered[at]) ==
          wanted) {
        *chosen = offered + at + 1;
        *length = offered[at];
        return SSL_TLSEXT_ERR_OK;
      }
    }
    return SSL_TLSEXT_ERR_ALERT_FATAL;
  };
  SSL_CTX_set_alpn_select_cb(context.get(), choose, const_cast<std::string_view*>(&protocol_));
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
  // What waits to be written grows, and moves then.
  SSL_set_mode(session.get(), SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_ENABLE_PARTIAL_WRITE);
  return session;
}

}  // namespace treadle
