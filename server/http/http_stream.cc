#include "server/http/http_stream.h"

#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <optional>
#include <utility>

namespace treadle {
namespace {

namespace net = boost::asio;
using boost::system::error_code;
using Executor = net::io_context::executor_type;
using Socket = net::basic_stream_socket<net::generic::stream_protocol, Executor>;
using Clock = std::chrono::steady_clock;

}  // namespace

struct HttpLoop::State {
  net::io_context io{1};
  net::basic_waitable_timer<Clock, net::wait_traits<Clock>, Executor> timer{io};
  net::posix::basic_stream_descriptor<Executor> descriptor{io};
  Task readable;
};

HttpLoop::HttpLoop() : state_(std::make_unique<State>()) {}
HttpLoop::~HttpLoop() = default;

void HttpLoop::Run() { state_->io.run(); }
void HttpLoop::Post(Task task) { net::post(state_->io, std::move(task)); }

std::shared_ptr<void> HttpLoop::KeepRunning() {
  return std::make_shared<net::executor_work_guard<Executor>>(net::make_work_guard(state_->io));
}

void HttpLoop::After(std::chrono::milliseconds time, Task task) {
  state_->timer.expires_after(time);
  state_->timer.async_wait([task = std::move(task)](const error_code& error) {
    if (!error) task();
  });
}

void HttpLoop::WhenReadable(int fd, Task task) {
  state_->descriptor.assign(fd);
  state_->readable = std::move(task);
  WaitReadable();
}

void HttpLoop::WaitReadable() {
  state_->descriptor.async_wait(state_->descriptor.wait_read, [this](const error_code& error) {
    if (error) return;
    state_->readable();
    WaitReadable();
  });
}

void HttpLoop::Stop() {
  error_code ignored;
  state_->timer.cancel();
  state_->descriptor.close(ignored);
}

struct HttpStream::State {
  explicit State(net::io_context& io) : socket(io) {}

  Socket socket;
  std::optional<net::ssl::stream<Socket&>> tls;
  std::array<char, 4096> read;
};

HttpStream::HttpStream(std::unique_ptr<State> state) : state_(std::move(state)) {}
HttpStream::~HttpStream() = default;

std::unique_ptr<HttpStream> HttpStream::Open(HttpLoop& loop, int fd, const SocketTls* tls) {
  auto state = std::make_unique<State>(loop.state_->io);
  error_code error;
  int domain = AF_INET;
  socklen_t size = sizeof domain;
  getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
  state->socket.assign({domain, 0}, fd, error);
  if (error) {
    close(fd);
    return nullptr;
  }
  if (tls != nullptr) {
    const TlsSession session = tls->NewSession(fd);
    if (!session) return nullptr;
    // Asio makes a session of its own, of the same context.
    SSL_CTX* const current = SSL_get_SSL_CTX(session.get());
    SSL_CTX_up_ref(current);
    net::ssl::context context(current);
    state->tls.emplace(state->socket, context);
  }
  return std::unique_ptr<HttpStream>(new HttpStream(std::move(state)));
}

bool HttpStream::tls() const { return state_->tls.has_value(); }

void HttpStream::Handshake(Then then) {
  state_->tls->async_handshake(net::ssl::stream_base::server,
                               [then = std::move(then)](const error_code& error) { then(!error); });
}

void HttpStream::Read(bool raw, std::function<void(std::string_view bytes)> then) {
  const auto buffer = net::buffer(state_->read);
  auto told = [this, then = std::move(then)](const error_code& error, size_t count) {
    then({state_->read.data(), error ? 0 : count});
  };
  if (tls() && !raw) {
    state_->tls->async_read_some(buffer, std::move(told));
  } else {
    state_->socket.async_read_some(buffer, std::move(told));
  }
}

void HttpStream::Write(std::string_view bytes, std::function<void()> progress, Then then) {
  const auto buffer = net::buffer(bytes.data(), bytes.size());
  auto more = [progress = std::move(progress)](const error_code& error, size_t) -> size_t {
    progress();
    return error ? 0 : 1 << 20;
  };
  auto told = [then = std::move(then)](const error_code& error, size_t) { then(!error); };
  if (tls()) {
    net::async_write(*state_->tls, buffer, std::move(more), std::move(told));
  } else {
    net::async_write(state_->socket, buffer, std::move(more), std::move(told));
  }
}

void HttpStream::End(bool greeted, Then then) {
  auto end = [this, then = std::move(then)](const error_code&) {
    error_code error;
    state_->socket.shutdown(Socket::shutdown_send, error);
    then(!error);
  };
  if (tls() && greeted) {
    state_->tls->async_shutdown(std::move(end));
  } else {
    net::post(state_->socket.get_executor(), [end = std::move(end)] { end({}); });
  }
}

void HttpStream::Close() {
  error_code ignored;
  state_->socket.close(ignored);
}

}  // namespace treadle
