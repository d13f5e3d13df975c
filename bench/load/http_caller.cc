#include "bench/load/http_caller.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <utility>

#include "base/number.h"
#include "base/status.h"
#include "bench/load/http_response.h"
#include "net/client_socket.h"
#include "net/open_files.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookForLate{100};
constexpr size_t kFiles = 65'536;  // as many connections as the system's limit allows

}  // namespace

absl::StatusOr<HttpUrl> ParseHttpUrl(std::string_view text) {
  HttpUrl url;
  const std::string_view whole = text;
  for (const auto& [scheme, tls] : {std::pair("http://", false), std::pair("https://", true)}) {
    if (!text.starts_with(scheme)) continue;
    text.remove_prefix(std::strlen(scheme));
    url.tls = tls;
  }
  const size_t slash = std::min(text.find('/'), text.size());
  std::string_view path = text.substr(slash);
  while (path.ends_with('/')) path.remove_suffix(1);
  url.path = path;
  std::string_view host = text.substr(0, slash);
  const size_t colon = host.rfind(':');
  std::optional<int> port = url.tls ? 443 : 80;
  if (colon != host.npos && !host.ends_with(']')) {
    port = NumberIn<int>(host.substr(colon + 1));
    host = host.substr(0, colon);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  if (host.empty() || !port || *port < 1 || *port > 65535 ||
      host.find_first_of("[]?#@ \r\n") != host.npos || path.find_first_of("?# \r\n") != path.npos) {
    return InvalidArgument("'", std::string(whole),
                           "' is no server's address, expected http://HOST:PORT or https://HOST");
  }
  url.host = host;
  url.port = *port;
  return url;
}

struct HttpCaller::Place {
  sockaddr_storage address = {};
  socklen_t size = 0;
  std::string host;
  std::string path;
  std::shared_ptr<ssl_ctx_st> tls;  // null: plaintext

  // A session with that server on the socket `fd`; null where there is none.
  TlsSession NewSession(int fd) const {
    if (!tls) return nullptr;
    TlsSession session(SSL_new(tls.get()));
    TREADLE_CHECK(session && SSL_set_fd(session.get(), fd) == 1);
    SSL_set_tlsext_host_name(session.get(), host.c_str());
    X509_VERIFY_PARAM* const verify = SSL_get0_param(session.get());
    if (X509_VERIFY_PARAM_set1_ip_asc(verify, host.c_str()) != 1) {
      TREADLE_CHECK(SSL_set1_host(session.get(), host.c_str()) == 1);
    }
    SSL_set_connect_state(session.get());
    SSL_set_mode(session.get(),
                 SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER | SSL_MODE_ENABLE_PARTIAL_WRITE);
    return session;
  }
};

struct HttpCaller::Request {
  std::string bytes;
  SteadyClock::time_point deadline;
  HttpHandlers handlers;
};

// One connection, with the request that it carries, or idle. What ends it removes it.
class HttpCaller::Connection {
 public:
  Connection(HttpCaller& caller, int fd)
      : caller_(caller),
        socket_(fd, caller.place_->NewSession(fd)),
        watch_(caller.loop_, fd, [this] { Ready(); }) {}

  bool busy() const { return request_ != nullptr; }
  bool late(SteadyClock::time_point now) const { return busy() && request_->deadline <= now; }

  void Carry(std::shared_ptr<Request> request) {
    request_ = std::move(request);
    written_ = 0;
    parser_ = HttpResponseParser();
    Ready();
  }

  // Removes this.
  void Fail(absl::Status why) {
    const std::shared_ptr<Request> request = std::move(request_);
    const int status = parser_.status();
    caller_.Remove(this);
    if (request) request->handlers.ended(status, why);
  }

 private:
  void Ready() {
    if (!busy()) return Fail({});  // the server has closed an idle connection, or talks unasked
    while (written_ < request_->bytes.size()) {
      const ssize_t count =
          socket_.Write(request_->bytes.data() + written_, request_->bytes.size() - written_);
      if (count < 0) return Broken();
      if (count == 0) return watch_.For(static_cast<uint32_t>(socket_.events()));
      written_ += static_cast<size_t>(count);
      if (written_ == request_->bytes.size()) request_->handlers.sent();
    }
    char buffer[ClientSocket::kReadSize];
    for (;;) {
      const ssize_t count = socket_.Read(buffer);
      if (count < 0) return Broken();
      if (count == 0) return watch_.For(static_cast<uint32_t>(socket_.events()));
      if (!Take({buffer, static_cast<size_t>(count)})) return;
    }
  }

  // False once this is removed or idle.
  bool Take(std::string_view bytes) {
    const auto taken = parser_.Feed(
        bytes, [this](std::string_view body) { request_->handlers.body(parser_.status(), body); });
    if (!taken.ok()) {
      Fail(taken.status());
      return false;
    }
    if (!parser_.done()) return true;
    const std::shared_ptr<Request> request = std::move(request_);
    const int status = parser_.status();
    if (parser_.keep_alive() && *taken == bytes.size()) {
      reused_ = true;
      caller_.idle_.push_back(this);
      watch_.For(EPOLLIN);
    } else {
      caller_.Remove(this);
    }
    request->handlers.ended(status, absl::OkStatus());
    return false;
  }

  void Broken() {
    const int error = errno;
    if (reused_ && !parser_.begun()) {  // the server had closed it before it knew of the request
      std::shared_ptr<Request> again = std::move(request_);
      HttpCaller& caller = caller_;
      caller.Remove(this);
      return caller.Begin(std::move(again));
    }
    if (written_ == request_->bytes.size() && socket_.ended() && parser_.begun()) {
      absl::Status end = parser_.End();
      return Fail(std::move(end));
    }
    Fail(absl::UnavailableError(
        Str(written_ < request_->bytes.size() ? "the request cannot be sent" : "no answer comes",
            socket_.ended() ? ": the server has closed the connection"
                            : Str(": ", std::strerror(error)))));
  }

  HttpCaller& caller_;
  ClientSocket socket_;
  EventLoop::Watch watch_;
  std::shared_ptr<Request> request_;
  size_t written_ = 0;
  bool reused_ = false;
  HttpResponseParser parser_;
};

absl::StatusOr<std::unique_ptr<HttpCaller>> HttpCaller::Open(const HttpUrl& url,
                                                             std::shared_ptr<ssl_ctx_st> tls,
                                                             const std::string& authorization) {
  if (url.tls && !tls) {
    return InvalidArgument(
        "https needs --tls-ca: a file with the certificate of who signed the "
        "server's");
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(url.host.c_str(), std::to_string(url.port).c_str(), &hints, &found);
  if (error != 0) return NotFound(url.host, ": ", gai_strerror(error));
  auto place = std::make_unique<Place>();
  std::memcpy(&place->address, found->ai_addr, found->ai_addrlen);
  place->size = found->ai_addrlen;
  freeaddrinfo(found);
  place->host = url.host;
  place->path = url.path;
  if (url.tls) place->tls = std::move(tls);
  std::string head = Str(" HTTP/1.1\r\nHost: ", url.host, ":", url.port, "\r\n");
  if (!authorization.empty()) head += "Authorization: " + authorization + "\r\n";
  const FileNeed need[] = {{"the load client", kFiles}};
  (void)ReserveFiles(need);  // raises the limit; one that is too low shows where a call fails
  return std::unique_ptr<HttpCaller>(new HttpCaller(std::move(place), std::move(head)));
}

HttpCaller::HttpCaller(std::unique_ptr<Place> place, std::string head)
    : place_(std::move(place)), head_(std::move(head)), thread_([this] {
        loop_.After(kLookForLate, [this] { EndLate(); });
        loop_.Run();
      }) {}

HttpCaller::~HttpCaller() {
  loop_.Post([this] { loop_.Stop(); });
  thread_.join();
  while (!connections_.empty()) {
    connections_.begin()->first->Fail(absl::CancelledError("the client ends"));
  }
}

void HttpCaller::Call(const std::string& path, const std::string& body,
                      std::chrono::milliseconds timeout, HttpHandlers handlers) {
  auto request = std::make_shared<Request>();
  request->bytes = Str(body.empty() ? "GET " : "POST ", place_->path, path, head_);
  if (!body.empty()) {
    request->bytes +=
        Str("Content-Type: application/json\r\nContent-Length: ", body.size(), "\r\n");
  }
  request->bytes += "\r\n" + body;
  request->deadline = SteadyClock::now() + timeout;
  request->handlers = std::move(handlers);
  loop_.Post([this, request = std::move(request)] { Begin(request); });
}

void HttpCaller::Begin(std::shared_ptr<Request> request) {
  if (!idle_.empty()) {
    Connection* const connection = idle_.back();
    idle_.pop_back();
    return connection->Carry(std::move(request));
  }
  const int fd = socket(place_->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int at_once = 1;
  if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  if (fd < 0 ||
      (connect(fd, reinterpret_cast<const sockaddr*>(&place_->address), place_->size) != 0 &&
       errno != EINPROGRESS)) {
    const std::string why = std::strerror(errno);
    if (fd >= 0) close(fd);
    return request->handlers.ended(0, absl::UnavailableError("no connection: " + why));
  }
  auto connection = std::make_unique<Connection>(*this, fd);
  Connection* const made = connection.get();
  connections_.emplace(made, std::move(connection));
  made->Carry(std::move(request));
}

void HttpCaller::Remove(Connection* connection) {
  std::erase(idle_, connection);
  connections_.erase(connection);
}

void HttpCaller::EndLate() {
  std::vector<Connection*> late;
  for (const auto& [connection, owned] : connections_) {
    if (connection->late(SteadyClock::now())) late.push_back(connection);
  }
  for (Connection* connection : late) {
    connection->Fail(absl::DeadlineExceededError("the answer is not whole in time"));
  }
  loop_.After(kLookForLate, [this] { EndLate(); });
}

absl::StatusOr<std::string> HttpCaller::Get(const std::string& path,
                                            std::chrono::milliseconds timeout) {
  auto text = std::make_shared<std::string>();
  auto done = std::make_shared<std::promise<absl::Status>>();
  Call(path, "", timeout,
       {.sent = [] {},
        .body = [text](int, std::string_view bytes) { text->append(bytes); },
        .ended =
            [text, done](int status, const absl::Status& end) {
              done->set_value(
                  !end.ok() || status == 200
                      ? end
                      : absl::UnavailableError(Str("HTTP ", status, ": ", text->substr(0, 200))));
            }});
  TREADLE_RETURN_IF_ERROR(done->get_future().get());
  return *text;
}

}  // namespace treadle
