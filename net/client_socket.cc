#include "net/client_socket.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace treadle {

bool HasUnread(int fd) {
  char byte = 0;
  return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

bool IsReset(int fd) {
  pollfd socket{.fd = fd, .events = 0, .revents = 0};
  return poll(&socket, 1, 0) > 0;  // POLLERR or POLLHUP
}

void FreeTlsSession::operator()(ssl_st* session) const { SSL_free(session); }

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
  // The buffer of bytes to be written grows, and moves then.
  SSL_set_mode(session.get(), SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_ENABLE_PARTIAL_WRITE);
  return session;
}

ClientSocket::ClientSocket(int fd, TlsSession tls)
    : fd_(fd), tls_(std::move(tls)), events_(POLLIN) {}

ClientSocket::~ClientSocket() { close(fd_); }

bool ClientSocket::greeted() const { return !tls_ || SSL_is_init_finished(tls_.get()) == 1; }

ssize_t ClientSocket::Count(ssize_t count, short event) {
  events_ = event;
  if (count > 0) return count;
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  (count == 0 ? ended_ : broken_) = true;
  return -1;
}

ssize_t ClientSocket::CountTls(int done, size_t count, short event) {
  events_ = event;
  if (done == 1) return static_cast<ssize_t>(count);
  const int error = SSL_get_error(tls_.get(), done);
  if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
    events_ = error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
    return 0;
  }
  (error == SSL_ERROR_ZERO_RETURN ? ended_ : broken_) = true;
  return -1;
}

ssize_t ClientSocket::Read(char* into) {
  if (!tls_) return Count(recv(fd_, into, kReadSize, 0), POLLIN);
  ERR_clear_error();  // else SSL_get_error sees another connection's
  size_t count = 0;
  const int done = SSL_read_ex(tls_.get(), into, kReadSize, &count);
  return CountTls(done, count, POLLIN);
}

ssize_t ClientSocket::Write(const char* from, size_t size) {
  if (!tls_) return Count(send(fd_, from, size, MSG_NOSIGNAL), POLLOUT);
  ERR_clear_error();
  size_t count = 0;
  const int done = SSL_write_ex(tls_.get(), from, size, &count);
  return CountTls(done, count, POLLOUT);
}

bool ClientSocket::End() {
  if (tls_ && !broken_) {
    ERR_clear_error();
    const int said = SSL_shutdown(tls_.get());
    if (said < 0 && CountTls(said, 0, POLLIN) == 0) return false;
  }
  shutdown(fd_, SHUT_WR);
  events_ = POLLIN;
  return true;
}

bool ClientSocket::Discard() {
  char buffer[kReadSize];
  const ssize_t count = recv(fd_, buffer, sizeof buffer, 0);
  return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

}  // namespace treadle
