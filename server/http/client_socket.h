// One accepted connection, plain or TLS: bytes in, bytes out, and what to wait for. Never blocks.
//
// Thread safety: none. SIGPIPE must be blocked or ignored where a TLS socket is used.
#pragma once

#include <sys/types.h>

#include <cstddef>

#include "server/http/socket_tls.h"

namespace treadle {

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
  // What to poll for before the next call.
  short events() const { return events_; }

  // The number of bytes; 0: not now; less: never again. The handshake is a part of it. `into` has
  // kReadSize bytes. A Write that gave 0 must be repeated as it was.
  ssize_t Read(char* into);
  ssize_t Write(const char* from, size_t size);

  // Tells the client that all is sent; false: not yet, call it again. From then on, and where Read
  // or Write said never again, only Discard may follow.
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
  bool broken_ = false;  // nothing more can be said
};

}  // namespace treadle
