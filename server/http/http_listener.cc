#include "server/http/http_listener.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "base/choice.h"
#include "base/status.h"
#include "net/address.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr size_t kMaxHead = 8192;
constexpr std::chrono::milliseconds kNoDescriptors{50};

constexpr Choice<int> kReasons[] = {
    {"OK", 200},        {"Bad Request", 400},        {"Unauthorized", 401},
    {"Not Found", 404}, {"Method Not Allowed", 405}, {"Request Header Fields Too Large", 431}};

std::string Write(const HttpResponse& response) {
  return Str("HTTP/1.1 ", response.code, " ", WordOf(kReasons, response.code),
             "\r\nContent-Type: ", response.content_type,
             "\r\nContent-Length: ", response.body.size(),
             response.code == 401 ? "\r\nWWW-Authenticate: Bearer" : "",
             "\r\nConnection: close\r\n\r\n", response.body);
}

// The head up to and without its empty line; an answer if it cannot be served.
std::optional<HttpResponse> Parse(std::string_view head, HttpRequest& request) {
  std::string_view line = head.substr(0, head.find("\r\n"));
  const size_t method_end = line.find(' ');
  const size_t target_end = line.rfind(' ');
  if (method_end == line.npos || target_end <= method_end ||
      !line.substr(target_end + 1).starts_with("HTTP/1.")) {
    return HttpResponse{.code = 400, .body = "expected an HTTP/1 request\n"};
  }
  if (line.substr(0, method_end) != "GET") {
    return HttpResponse{.code = 405, .body = "expected GET\n"};
  }
  const std::string_view target = line.substr(method_end + 1, target_end - method_end - 1);
  request.path = std::string(target.substr(0, target.find('?')));
  while (line.size() + 2 < head.size()) {
    head.remove_prefix(line.size() + 2);
    line = head.substr(0, head.find("\r\n"));
    const size_t colon = line.find(':');
    if (colon == line.npos) continue;
    const absl::string_view name(line.data(), colon);
    const absl::string_view value(line.data() + colon + 1, line.size() - colon - 1);
    if (!absl::EqualsIgnoreCase(name, "authorization")) continue;
    request.authorization = std::string(absl::StripAsciiWhitespace(value));
  }
  return std::nullopt;
}

}  // namespace

struct HttpListener::Connection {
  Connection(int fd, TlsSession tls, SteadyClock::time_point until)
      : socket(fd, std::move(tls)), deadline(until) {}

  ClientSocket socket;
  const SteadyClock::time_point deadline;
  std::string in;
  std::string out;  // not empty: answering
  size_t sent = 0;
  bool closing = false;  // all is sent, or no more can be; waits for the client to close
};

HttpListener::HttpListener(int socket, int port, const Options& options, Handler handler)
    : socket_(socket),
      port_(port),
      options_(options),
      handler_(std::move(handler)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  TREADLE_CHECK(stop_ >= 0);
  thread_ = std::thread([this] { Run(); });
}

HttpListener::~HttpListener() {
  const uint64_t one = 1;
  TREADLE_CHECK(write(stop_, &one, sizeof one) == sizeof one);
  thread_.join();
  close(stop_);
  close(socket_);
}

void HttpListener::Run() {
  // OpenSSL writes without MSG_NOSIGNAL.
  sigset_t broken_pipe;
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  TREADLE_CHECK(pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr) == 0);
  std::vector<pollfd> sources;
  while (true) {
    sources.assign({{stop_, POLLIN, 0}, {socket_, POLLIN, 0}});
    for (const Connection& connection : connections_) {
      sources.push_back({connection.socket.fd(), connection.socket.events(), 0});
    }
    poll(sources.data(), sources.size(), Patience());
    if (sources[0].revents != 0) return;
    const auto now = SteadyClock::now();
    size_t i = 2;
    std::erase_if(connections_, [&](Connection& connection) {
      return (sources[i++].revents != 0 && !Serve(connection)) || now >= connection.deadline;
    });
    if (sources[1].revents != 0) Accept(now);
  }
}

int HttpListener::Patience() const {
  if (connections_.empty()) return -1;  // the first of the list is the oldest
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(connections_.front().deadline -
                                                                 SteadyClock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

void HttpListener::Accept(SteadyClock::time_point now) {
  const int fd = accept4(socket_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {  // without descriptors the connection stays pending: do not spin on it
    if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(kNoDescriptors);
    return;
  }
  // An answer over TLS is several writes: none shall wait until the one before is acknowledged.
  const int at_once = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  TlsSession tls;
  if (options_.tls != nullptr) {
    tls = options_.tls->NewSession(fd);
    if (!tls) {  // never plaintext instead
      close(fd);
      return;
    }
  }
  if (connections_.size() >= options_.connections) connections_.pop_front();
  connections_.emplace_back(fd, std::move(tls), now + options_.patience);
}

bool HttpListener::Serve(Connection& connection) {
  ClientSocket& socket = connection.socket;
  if (connection.closing) return socket.Discard();
  if (connection.out.empty()) {
    char buffer[ClientSocket::kReadSize];
    const ssize_t count = socket.Read(buffer);
    if (count > 0) {
      connection.in.append(buffer, static_cast<size_t>(count));
      Answer(connection);
    } else if (count < 0) {
      connection.closing = socket.End();
    }
    if (connection.out.empty()) return true;
  }
  if (connection.sent < connection.out.size()) {
    const ssize_t count = socket.Write(connection.out.data() + connection.sent,
                                       connection.out.size() - connection.sent);
    if (count < 0) return false;
    connection.sent += static_cast<size_t>(count);
  }
  if (connection.sent == connection.out.size()) connection.closing = socket.End();
  return true;
}

void HttpListener::Answer(Connection& connection) {
  const size_t end = connection.in.find("\r\n\r\n");
  if (end > kMaxHead) {
    if (end != std::string::npos || connection.in.size() > kMaxHead) {
      connection.out = Write({.code = 431, .body = "the request's head is too large\n"});
    }
    return;
  }
  HttpRequest request;
  const std::optional<HttpResponse> refusal =
      Parse(std::string_view(connection.in).substr(0, end), request);
  connection.out = Write(refusal ? *refusal : handler_(request));
}

absl::StatusOr<std::unique_ptr<HttpListener>> HttpListener::Start(const std::string& text,
                                                                  const Options& options,
                                                                  Handler handler) {
  TREADLE_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  TREADLE_ASSIGN_OR_RETURN(const int fd, OpenListener(address));
  return std::unique_ptr<HttpListener>(
      new HttpListener(fd, address.port, options, std::move(handler)));
}

}  // namespace treadle
