#include "server/http/http_server.h"

#include <sys/socket.h>

#include <algorithm>

#include "base/status.h"
#include "server/http/http_connection.h"

namespace treadle {
namespace {

constexpr std::chrono::milliseconds kSweep{100};  // between two looks at deadlines
constexpr size_t kFileShare = 4;                  // a connection for each so many files
// The system's buffer in each direction: by itself it keeps megabytes for a slow reader.
constexpr int kSystemBuffer = 128 << 10;

HttpOptions Completed(HttpOptions options) {
  const auto [connections, per_address] =
      Admission::Affordable({options.connections, options.per_address}, kFileShare, /*others=*/0);
  options.connections = connections;
  options.per_address = per_address;
  if (!options.refusal) {
    options.refusal = [](int code, const std::string& message) {
      return HttpResponse{.code = code, .body = message + "\n"};
    };
  }
  return options;
}

}  // namespace

// -- everybody who is connected -------------------------------------------------------------------

HttpHouse::HttpHouse(int listener, const HttpOptions& options, std::vector<HttpRoute> routes)
    : options_(Completed(options)),
      routes_(std::move(routes)),
      newcomers_(std::clamp<size_t>(options_.per_address / 8, 1, 64)),
      admission_(*loop_, listener,
                 {.limits = {options_.connections, options_.per_address},
                  .newcomers = newcomers_,
                  .tls = options_.tls,
                  .make_room = [this](const std::string& host) { return MakeRoom(host); },
                  .enter = [this](Newcomer newcomer) { Enter(std::move(newcomer)); },
                  .sweep_every = kSweep,
                  .sweep = [this] { Sweep(); }}) {
  admission_.Open();
}

void HttpHouse::Enter(Newcomer newcomer) {
  for (const int buffer : {SO_SNDBUF, SO_RCVBUF}) {
    setsockopt(newcomer.socket->fd(), SOL_SOCKET, buffer, &kSystemBuffer, sizeof kSystemBuffer);
  }
  const auto connection = std::make_shared<HttpConnection>(*this, next_, std::move(newcomer));
  connections_.emplace(next_++, connection);
  connection->Start();
}

bool HttpHouse::MakeRoom(const std::string& host) {
  const auto close_oldest = [&](auto may_go) {
    const auto oldest = std::ranges::find_if(connections_, [&](const auto& entry) {
      const HttpConnection& connection = *entry.second;
      return connection.host() == host && may_go(connection) && connection.expendable();
    });
    if (oldest == connections_.end()) return false;
    std::shared_ptr<HttpConnection>(oldest->second)->Close();
    return true;
  };
  const auto new_here = [&](const auto& one) { return one.id() + newcomers_ >= next_; };
  return close_oldest([&](const auto& one) { return one.silent() && !new_here(one); }) ||
         close_oldest([](const auto& one) { return !one.silent(); }) ||
         close_oldest([](const auto& one) { return one.silent(); });
}

void HttpHouse::Leave(uint64_t id, const std::string& host) {
  admission_.Leave(host);
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
  const auto now = std::chrono::steady_clock::now();
  for (auto next = connections_.begin(); next != connections_.end();) {
    const std::shared_ptr<HttpConnection> connection = (next++)->second;
    connection->Look(now);
  }
}

void HttpHouse::Close() {
  admission_.Close();
  while (!connections_.empty()) {
    const std::shared_ptr<HttpConnection> connection = connections_.begin()->second;
    connection->Close();
  }
  closed_ = true;
  if (alive_ == 0) loop_->Stop();
}

void HttpHouse::Gone() {
  if (--alive_ == 0 && closed_) loop_->Stop();
}

// -- the server -----------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& text,
                                                              const HttpOptions& options,
                                                              std::vector<HttpRoute> routes) {
  TREADLE_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  TREADLE_ASSIGN_OR_RETURN(const int listener, OpenListener(address));
  HttpOptions own = options;
  own.any_host |= options.tls != nullptr || !IsLoopback(address.host);
  auto house = std::make_unique<HttpHouse>(listener, own, std::move(routes));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(address), std::move(house)));
}

HttpServer::HttpServer(Address address, std::unique_ptr<HttpHouse> house)
    : address_(std::move(address)), house_(std::move(house)) {
  thread_ = std::thread([this] { house_->loop().Run(); });
}

HttpServer::~HttpServer() {
  house_->loop().Post([this] { house_->Close(); });
  thread_.join();
}

}  // namespace treadle
