#include "tests/support/faults/byte_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>

#include "base/status.h"

namespace treadle {
namespace {

using Kind = ByteFault::Kind;
using Where = ByteFault::Where;

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

bool SendAll(int to, const char* bytes, size_t count) {
  while (count > 0) {
    const ssize_t sent = send(to, bytes, count, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    count -= static_cast<size_t>(sent);
  }
  return true;
}

}  // namespace

struct ByteProxy::Connection {
  int client = -1, server = -1;
  std::atomic<int> running{2};  // threads
  std::thread up, down;

  void Cut() const {
    shutdown(client, SHUT_RDWR);
    shutdown(server, SHUT_RDWR);
  }
  ~Connection() {
    Cut();
    up.join();
    down.join();
    close(client);
    close(server);
  }
};

ByteProxy::ByteProxy(int server_port)
    : server_port_(server_port), listening_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  TREADLE_CHECK(bind(listening_, any, size) == 0 && listen(listening_, 128) == 0 &&
                getsockname(listening_, any, &size) == 0);
  port_ = ntohs(address.sin_port);
  accepting_ = std::thread([this] { Accept(); });
}

ByteProxy::~ByteProxy() {
  {
    const MutexLock lock(mutex_);
    over_ = true;
  }
  shutdown(listening_, SHUT_RDWR);
  accepting_.join();
  close(listening_);
  std::list<std::unique_ptr<Connection>> connections;
  {
    const MutexLock lock(mutex_);
    connections.swap(connections_);
  }
}

void ByteProxy::Inject(const ByteFault& fault) {
  const MutexLock lock(mutex_);
  faults_.push_back(fault);
}

void ByteProxy::CutAll() {
  const MutexLock lock(mutex_);
  for (const auto& connection : connections_) connection->Cut();
  ++happened_;
}

int ByteProxy::happened() const {
  const MutexLock lock(mutex_);
  return happened_;
}

void ByteProxy::Accept() {
  while (true) {
    auto connection = std::make_unique<Connection>();
    connection->client = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    connection->server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = Loopback(server_port_);
    // Where the server takes no connection, the client's ends at once.
    if (connect(connection->server, reinterpret_cast<const sockaddr*>(&address), sizeof address)) {
      connection->Cut();
    }
    Connection& opened = *connection;
    opened.up = std::thread([this, &opened] { Pump(opened, Where::kToServer); });
    opened.down = std::thread([this, &opened] { Pump(opened, Where::kToClient); });
    std::list<std::unique_ptr<Connection>> ended;
    const MutexLock lock(mutex_);
    for (auto each = connections_.begin(); each != connections_.end();) {
      const auto next = std::next(each);
      if ((*each)->running == 0) ended.splice(ended.end(), connections_, each);
      each = next;
    }
    if (over_) return;
    connections_.push_back(std::move(connection));
  }
}

void ByteProxy::Pump(Connection& connection, Where where) {
  const bool up = where == Where::kToServer;
  const int from = up ? connection.client : connection.server;
  const int to = up ? connection.server : connection.client;
  std::vector<char> bytes;
  while (true) {
    bytes.resize(16384);
    const ssize_t count = recv(from, bytes.data(), bytes.size(), 0);
    if (count <= 0) break;
    bytes.resize(static_cast<size_t>(count));
    if (!Pass(connection, where, bytes, to)) {
      connection.Cut();
      break;
    }
  }
  shutdown(to, SHUT_WR);
  --connection.running;
}

bool ByteProxy::TakeFault(Where where, size_t bytes, ByteFault& fault) {
  const MutexLock lock(mutex_);
  for (auto each = faults_.begin(); each != faults_.end(); ++each) {
    if (each->where != where) continue;
    each->skip -= static_cast<int64_t>(bytes);
    if (each->skip >= 0) continue;
    fault = *each;
    faults_.erase(each);
    ++happened_;
    return true;
  }
  return false;
}

bool ByteProxy::Pass(Connection& connection, Where where, std::vector<char>& bytes, int to) {
  const auto pass = [&](size_t count) { return SendAll(to, bytes.data(), count); };
  ByteFault fault;
  if (!TakeFault(where, bytes.size(), fault)) return pass(bytes.size());
  switch (fault.kind) {
    case Kind::kClose:
      return false;
    case Kind::kTruncate:
      pass(bytes.size() / 2);
      return false;
    case Kind::kHalfClose:
      shutdown(to, SHUT_WR);
      return true;  // what comes later finds no way
    case Kind::kDelay: {
      // In steps, so that the end of the connection is the delay's.
      const auto until = std::chrono::steady_clock::now() + fault.delay;
      while (std::chrono::steady_clock::now() < until && connection.running == 2) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      return pass(bytes.size());
    }
    case Kind::kDrop:
      return true;
    case Kind::kDuplicate:
      return pass(bytes.size()) && pass(bytes.size());
    case Kind::kFlip:
      bytes[bytes.size() / 2] ^= 0x10;
      return pass(bytes.size());
  }
  return false;
}

}  // namespace treadle
