// Sockets that we serve ourselves: one accepted connection, plain or TLS, and whose TLS that is.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string_view>

#include "base/sync.h"

struct ssl_st;      // OpenSSL's SSL
struct ssl_ctx_st;  // and SSL_CTX

namespace treadle {

struct FreeTlsSession {
  void operator()(ssl_st* session) const;
};
using TlsSession = std::unique_ptr<ssl_st, FreeTlsSession>;

// Whether bytes have come on the socket `fd` that nobody has read. Any thread.
bool HasUnread(int fd);
// Whether the connection of the socket `fd` was reset, or both its sides have ended. Any thread.
bool IsReset(int fd);

// A server's certificate, and whether it asks clients for theirs. Thread safety: any thread.
class SocketTls {
 public:
  // `protocol` is agreed on with clients that offer some (ALPN, RFC 7301): a literal, "h2" or
  // "http/1.1".
  explicit SocketTls(std::string_view protocol) : protocol_(protocol) {}

  // A server's, for connections that begin afterwards; before the first of them.
  void Set(std::shared_ptr<ssl_ctx_st> context) ABSL_LOCKS_EXCLUDED(mutex_);
  // The server's side of a connection on the non-blocking socket `fd`, which it does not own. Null
  // without memory.
  TlsSession NewSession(int fd) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::string_view protocol_;
  mutable Mutex mutex_;
  std::shared_ptr<ssl_ctx_st> context_ ABSL_GUARDED_BY(mutex_);
};

// Bytes in, bytes out, and what to wait for. Never blocks. SIGPIPE must be blocked or ignored where
// a TLS socket is used. Thread safety: none.
class ClientSocket {
 public:
  // A read takes a whole TLS record with this, so that nothing is left where poll does not see it.
  static constexpr size_t kReadSize = 16'384;

  // Owns `fd`. `tls`: a session on it; null: plaintext.
  ClientSocket(int fd, TlsSession tls);
  ~ClientSocket();
  ClientSocket(const ClientSocket&) = delete;
  ClientSocket& operator=(const ClientSocket&) = delete;

  int fd() const { return fd_; }
  // Without TLS, or its handshake is over.
  bool greeted() const;
  // Whether Read said never again because the client has sent all; it may still read.
  bool ended() const { return ended_; }
  // The events to poll for before the next call.
  short events() const { return events_; }

  // The number of bytes; 0: not now; less: never again. The handshake is a part of it. `into` has
  // kReadSize bytes. A Write that gave 0 must be repeated as it was.
  ssize_t Read(char* into);
  ssize_t Write(const char* from, size_t size);

  // Tells the client that all is sent; false: not yet, call it again. From then on, and where
  // Write said never again, or Read before the client's end, only Discard may follow.
  bool End();
  // Reads what the client still sends: were it left, its end might lose the last bytes of the
  // answer. False once the client has closed, too.
  bool Discard();

 private:
  ssize_t Count(ssize_t count, short event);
  ssize_t CountTls(int done, size_t count, short event);

  const int fd_;
  const TlsSession tls_;
  short events_;
  bool ended_ = false;   // nothing more will be read
  bool broken_ = false;  // nothing more can be said
};

}  // namespace treadle
