#include "server/http/http_server.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/status.h"
#include "server/http/http_connection.h"

namespace treadle {
namespace {

constexpr std::chrono::milliseconds kSweep{100};  // between two looks at deadlines
// Of the system, in each direction: by itself it keeps megabytes for who reads slowly.
constexpr int kSystemBuffer = 128 << 10;

// Lets the process open a file for each connection more; fewer connections where it may not.
size_t Affordable(size_t connections) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return connections;
  files.rlim_cur = std::min<rlim_t>(files.rlim_cur + connections, files.rlim_max);
  setrlimit(RLIMIT_NOFILE, &files);
  return std::clamp<size_t>(files.rlim_cur / 4, 4, std::max<size_t>(connections, 4));
}

// False: there is nobody else now.
bool Accept(int listener, HttpHouse& house) {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  const int fd =
      accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) {
      return errno == EINTR || errno == ECONNABORTED;
    }
    // The connection stays pending; without room, no spinning on it.
    if (house.MakeRoom("")) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return false;
  }
  const int at_once = 1;  // an answer is several writes: none shall wait for an acknowledgement
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSystemBuffer, sizeof kSystemBuffer);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kSystemBuffer, sizeof kSystemBuffer);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  getnameinfo(reinterpret_cast<const sockaddr*>(&from), size, host, sizeof host, port, sizeof port,
              NI_NUMERICHOST | NI_NUMERICSERV);
  house.Admit(
      fd, host,
      from.ss_family == AF_INET6 ? Str("ipv6:[", host, "]:", port) : Str("ipv4:", host, ":", port));
  return true;
}

}  // namespace

// -- everybody who is connected -------------------------------------------------------------------

HttpHouse::HttpHouse(const HttpOptions& options, std::vector<HttpRoute> routes)
    : options_(options), routes_(std::move(routes)) {
  options_.connections = Affordable(options.connections);
  options_.per_address = std::min(options.per_address, options_.connections);
  if (options_.refusal) return;
  options_.refusal = [](int code, const std::string& message) {
    return HttpResponse{.code = code, .body = message + "\n"};
  };
}

void HttpHouse::Admit(int fd, const std::string& host, const std::string& peer) {
  auto stream = HttpStream::Open(*loop_, fd, options_.tls);  // which closes it, if it is not kept
  const auto of = of_host_.find(host);
  const bool too_many = of != of_host_.end() && of->second >= options_.per_address;
  const bool full = connections_.size() >= options_.connections;
  if (!stream || ((too_many || full) && !MakeRoom(too_many ? host : ""))) return;
  const auto connection =
      std::make_shared<HttpConnection>(*this, next_, std::move(stream), host, peer);
  if (connections_.empty()) Sweep();
  connections_.emplace(next_++, connection);
  ++of_host_[host];
  connection->Start();
}

bool HttpHouse::MakeRoom(const std::string& host) {
  const auto most =
      std::ranges::max_element(of_host_, {}, [](const auto& count) { return count.second; });
  if (most == of_host_.end()) return false;
  const std::string& from = host.empty() ? most->first : host;
  const auto idle = std::ranges::find_if(connections_, [&](const auto& connection) {
    return connection.second->host() == from && connection.second->idle();
  });
  if (idle == connections_.end()) return false;
  const std::shared_ptr<HttpConnection> oldest = idle->second;
  oldest->Close();
  return true;
}

void HttpHouse::Remove(uint64_t id, const std::string& host) {
  const auto of_host = of_host_.find(host);
  if (--of_host->second == 0) of_host_.erase(of_host);
  connections_.erase(id);
}

void HttpHouse::Count(uint64_t added, uint64_t removed) {
  receiving_ += added - removed;
  if (receiving_ <= options_.receiving_bytes) return;
  const auto largest = std::ranges::max_element(
      connections_, {}, [](const auto& connection) { return connection.second->receiving(); });
  const std::shared_ptr<HttpConnection> connection = largest->second;
  connection->Refuse(503, Str("the server holds more than ", options_.receiving_bytes,
                              " bytes of unfinished requests (--max-receive-memory)"));
}

void HttpHouse::Sweep() {
  loop_->After(kSweep, [this] {
    const auto now = std::chrono::steady_clock::now();
    for (auto next = connections_.begin(); next != connections_.end();) {
      const std::shared_ptr<HttpConnection> connection = (next++)->second;
      connection->Look(now);
    }
    if (!connections_.empty()) Sweep();
  });
}

void HttpHouse::CloseAll() {
  while (!connections_.empty()) {
    const std::shared_ptr<HttpConnection> connection = connections_.begin()->second;
    connection->Close();
  }
}

// -- the server -----------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& text,
                                                              const HttpOptions& options,
                                                              std::vector<HttpRoute> routes) {
  TREADLE_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  TREADLE_ASSIGN_OR_RETURN(const int listener, OpenListener(address));
  HttpOptions own = options;
  own.any_host |= options.tls != nullptr || !IsLoopback(address.host);
  auto house = std::make_unique<HttpHouse>(own, std::move(routes));
  return std::unique_ptr<HttpServer>(
      new HttpServer(std::move(address), listener, std::move(house)));
}

HttpServer::HttpServer(Address address, int listener, std::unique_ptr<HttpHouse> house)
    : address_(std::move(address)), house_(std::move(house)) {
  house_->loop().WhenReadable(listener, [house = house_.get(), listener] {
    while (Accept(listener, *house)) {
    }
  });
  thread_ = std::thread([this] { house_->loop().Run(); });
}

HttpServer::~HttpServer() {
  house_->loop().Post([this] {
    house_->loop().Stop();
    house_->CloseAll();
  });
  thread_.join();
}

}  // namespace treadle
