#include "net/door.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kBuffer = 256 << 10;   // of one direction; fuller ones are not read into
constexpr size_t kOwnDescriptors = 64;  // files, engine, log: what the process needs besides
constexpr size_t kDescriptorsEach = 3;
constexpr std::chrono::milliseconds kSweep{500};
constexpr std::chrono::milliseconds kLastWords{2'000};  // for the client to close, once told
constexpr int kDiscarded = 64;  // reads of what a client still sends meanwhile
// Calls that are given up before they are answered: far more than people and their timeouts do.
constexpr double kMostGivenUp = 250, kMostGivenUpOfHost = 1000;  // at once
constexpr double kGivenUpASecond = 100;                          // of a connection, later
constexpr double kFewCalls = 16;  // of each connection of an address that gave up too many
constexpr uint64_t kListener = 0, kStop = ~uint64_t{0};

// Bytes on their way.
class Bytes {
 public:
  std::string& end() { return bytes_; }
  std::string_view rest() const { return std::string_view(bytes_).substr(sent_); }
  bool empty() const { return sent_ == bytes_.size(); }
  bool full() const { return bytes_.size() - sent_ >= kBuffer; }
  void Sent(size_t count) {
    sent_ += count;
    if (empty() || sent_ >= kBuffer) {
      bytes_.erase(0, sent_);
      sent_ = 0;
    }
  }

 private:
  std::string bytes_;
  size_t sent_ = 0;
};

std::string HostOf(const sockaddr_storage& address, socklen_t size, std::string& peer) {
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof host, port,
              sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  peer = address.ss_family == AF_INET6 ? Str("ipv6:[", host, "]:", port)
                                       : Str("ipv4:", host, ":", port);
  return host;
}

// Lets the process open as many files as the connections need; fewer connections where it may not.
DoorLimits Affordable(DoorLimits limits) {
  const rlim_t wanted = limits.connections * kDescriptorsEach + kOwnDescriptors;
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return limits;
  if (files.rlim_cur < wanted && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = std::min(wanted, files.rlim_max);
    if (setrlimit(RLIMIT_NOFILE, &files) != 0) getrlimit(RLIMIT_NOFILE, &files);
  }
  if (files.rlim_cur < wanted) {
    const size_t spare = files.rlim_cur > kOwnDescriptors ? files.rlim_cur - kOwnDescriptors : 0;
    limits.connections = std::clamp<size_t>(spare / kDescriptorsEach, 4, limits.connections);
  }
  limits.per_address = std::min(limits.per_address, limits.connections);
  return limits;
}

}  // namespace

struct Door::Connection {
  Connection(uint64_t name, int fd, TlsSession tls, const Http2Guard::Limits& limits)
      : id(name), client(fd, std::move(tls)), guard(limits) {}
  ~Connection() {
    if (inner >= 0) close(inner);
  }

  const uint64_t id;  // even; of the socket to the server: the odd one after it
  ClientSocket client;
  Http2Guard guard;
  std::string peer;
  Host* host = nullptr;  // the door's
  std::string unread;    // of the client, for the guard
  Forgotten given_up{kGivenUpASecond};
  uint64_t counted_given_up = 0;  // of the guard's
  int inner = -1;                 // our end of the socket to the server
  int adopted = -1;               // the server's
  Bytes to_server, to_client;
  SteadyClock::time_point deadline = SteadyClock::time_point::max();
  short reads = EPOLLIN, writes = EPOLLOUT;  // what a read and a write of the client's wait for
  uint32_t client_events = 0, inner_events = 0;
  uint64_t held = 0;          // as counted in the door's
  bool client_ended = false;  // will say nothing more
  bool server_ended = false;
  bool told = false;    // the server knows that its client has ended
  bool ending = false;  // all has been said: waits for the client to close
  int discarded = 0;    // reads since then
  bool over = false;
};

Door::Door(int listener, const DoorLimits& limits, const SocketTls* tls)
    : listener_(listener),
      limits_(Affordable(limits)),
      tls_(tls),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  TREADLE_CHECK(epoll_ >= 0 && stop_ >= 0);
  for (const auto& [fd, id] : {std::pair(listener_, kListener), std::pair(stop_, kStop)}) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = id}};
    TREADLE_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) == 0);
  }
}

void Door::Open(Adopt adopt) {
  adopt_ = std::move(adopt);
  thread_ = std::thread([this] { Run(); });
}

absl::StatusOr<std::unique_ptr<Door>> Door::Listen(Address& address, const DoorLimits& limits,
                                                   const SocketTls* tls) {
  TREADLE_ASSIGN_OR_RETURN(const int listener, OpenListener(address));
  return std::unique_ptr<Door>(new Door(listener, limits, tls));
}

Door::~Door() {
  Close(std::chrono::milliseconds(0));
  close(listener_);
  close(epoll_);
  close(stop_);
}

void Door::Close(std::chrono::milliseconds grace) {
  if (!thread_.joinable()) return;
  grace_ = grace;
  const uint64_t one = 1;
  TREADLE_CHECK(write(stop_, &one, sizeof one) == sizeof one);
  thread_.join();
}

std::string Door::Peer(int fd) const {
  MutexLock lock(mutex_);
  const auto peer = peers_.find(fd);
  return peer == peers_.end() ? "" : peer->second;
}

void Door::Run() {
  sigset_t broken_pipe;  // OpenSSL writes without MSG_NOSIGNAL
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  TREADLE_CHECK(pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr) == 0);
  std::vector<epoll_event> events(64);
  SteadyClock::time_point swept = SteadyClock::now(), until = SteadyClock::time_point::max();
  while (true) {
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()),
                                 connections_.empty() ? -1 : static_cast<int>(kSweep.count()));
    for (int i = 0; i < count; ++i) {
      const uint64_t id = events[static_cast<size_t>(i)].data.u64;
      if (id == kStop) {
        uint64_t ignored = 0;
        TREADLE_CHECK(read(stop_, &ignored, sizeof ignored) == sizeof ignored);
        until = SteadyClock::now() + grace_;
        epoll_ctl(epoll_, EPOLL_CTL_DEL, listener_, nullptr);
      } else if (id == kListener) {
        while (Accept()) {
        }
      } else if (const auto connection = connections_.find(id & ~uint64_t{1});
                 connection != connections_.end()) {  // else it went with an event before this
        Carry(*connection->second);
        if (connection->second->over) Remove(connection->first);
      }
    }
    const auto now = SteadyClock::now();
    if (now - swept >= kSweep) {
      swept = now;
      Sweep();
    }
    counts_->held = static_cast<int64_t>(held_);
    if (until != SteadyClock::time_point::max()) {
      const bool spoken = std::ranges::all_of(connections_, [](const auto& connection) {
        return connection.second->inner < 0 || connection.second->ending;
      });
      if (spoken || now >= until) break;
    }
  }
  while (!connections_.empty()) Remove(connections_.begin()->first);
  counts_->held = 0;
}

bool Door::Accept() {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  const int fd =
      accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) {
      return errno == EINTR || errno == ECONNABORTED;
    }
    // The connection stays pending; without room, no spinning on it.
    if (MakeRoom(nullptr)) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return false;
  }
  std::string peer;
  const std::string host = HostOf(from, size, peer);
  const auto known = hosts_.find(host);
  const bool too_many = known != hosts_.end() && known->second.connections >= limits_.per_address;
  TlsSession tls;
  if (((too_many || connections_.size() >= limits_.connections) &&
       !MakeRoom(too_many ? &known->second : nullptr)) ||
      (tls_ != nullptr && !(tls = tls_->NewSession(fd)))) {
    ++counts_->turned_away;
    close(fd);
    return true;
  }
  const int at_once = 1;  // an answer is several writes: none shall wait for an acknowledgement
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  const uint64_t id = next_++ * 2;
  auto connection = std::make_unique<Connection>(id, fd, std::move(tls), limits_.http2);
  connection->peer = std::move(peer);
  connection->host = &hosts_[host];
  ++connection->host->connections;
  connection->deadline = SteadyClock::now() + limits_.patience;
  Watch(*connection);
  connections_.emplace(id, std::move(connection));
  ++counts_->connections;
  return true;
}

// Of `host`; null: of the one that has most connections.
bool Door::MakeRoom(const Host* host) {
  if (host == nullptr) {
    const auto most = std::ranges::max_element(
        hosts_, {}, [](const auto& entry) { return entry.second.connections; });
    if (most == hosts_.end()) return false;
    host = &most->second;
  }
  const auto idle = std::ranges::find_if(connections_, [&](const auto& connection) {
    return connection.second->host == host && connection.second->guard.streams() == 0;
  });
  if (idle == connections_.end()) return false;
  ++counts_->turned_away;
  Remove(idle->first);
  return true;
}

void Door::Remove(uint64_t id) {
  const auto found = connections_.find(id);
  Connection& connection = *found->second;
  if (connection.adopted >= 0) {
    MutexLock lock(mutex_);
    // The number may be another's already: the server closes its end when it likes.
    const auto peer = peers_.find(connection.adopted);
    if (peer != peers_.end() && peer->second == connection.peer) peers_.erase(peer);
  }
  held_ -= connection.held;
  connection.host->given_up.Add(static_cast<double>(connection.guard.unanswered()),
                                SteadyClock::now());
  --connection.host->connections;  // forgotten by a sweep, once what it gave up is
  --counts_->connections;
  connections_.erase(found);  // closes its descriptors, which leave the epoll set thereby
}

void Door::Carry(Connection& connection) {
  if (connection.ending) {
    connection.over = !connection.client.Discard() || ++connection.discarded > kDiscarded;
    return;
  }
  if (Read(connection)) Flush(connection);
  Watch(connection);
}

// What either side has to say; false: the connection was ended for it.
bool Door::Read(Connection& connection) {
  char buffer[64 << 10];
  static_assert(sizeof buffer >= ClientSocket::kReadSize);
  if (!connection.unread.empty()) {
    const std::string unread = std::exchange(connection.unread, {});
    if (!Take(connection, unread)) return false;
  } else if (!connection.client_ended && !connection.to_server.full()) {
    const ssize_t count = connection.client.Read(buffer);
    connection.reads = connection.client.events();
    if (count < 0) connection.client_ended = true;
    if (count > 0 && !Take(connection, {buffer, static_cast<size_t>(count)})) return false;
  }
  if (connection.inner >= 0 && !connection.server_ended && !connection.to_client.full()) {
    const ssize_t count = recv(connection.inner, buffer, sizeof buffer, 0);
    if (count > 0) {
      connection.guard.FromServer({buffer, static_cast<size_t>(count)}, connection.to_client.end());
      Count(connection);
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      connection.server_ended = true;
    }
  }
  return !connection.over;
}

// Lets the guard read; false: the connection was ended for it.
bool Door::Take(Connection& connection, std::string_view bytes) {
  while (!bytes.empty()) {
    const double allowed = Allowed(connection, SteadyClock::now());
    if (allowed < 1) break;
    const absl::StatusOr<size_t> taken =
        connection.guard.FromClient(bytes, connection.to_server.end(), connection.to_client.end(),
                                    static_cast<size_t>(allowed));
    if (!taken.ok()) {
      Violated(connection, taken.status());
      return false;
    }
    bytes.remove_prefix(*taken);
    Count(connection);
    if (connection.guard.greeted() && connection.inner < 0) Introduce(connection);
    if (held_ > limits_.receiving) LimitReceiving();
  }
  connection.unread = bytes;
  return true;
}

double Door::Allowed(const Connection& connection, SteadyClock::time_point now) const {
  const double allowed = kMostGivenUp - connection.given_up.At(now);
  if (connection.host->given_up.At(now) < kMostGivenUpOfHost) return allowed;
  return std::min(allowed, kFewCalls - static_cast<double>(connection.guard.unanswered()));
}

void Door::Count(Connection& connection) {
  const uint64_t given_up = connection.guard.given_up() - connection.counted_given_up;
  if (given_up > 0) {
    const auto now = SteadyClock::now();
    connection.counted_given_up += given_up;
    connection.given_up.Add(static_cast<double>(given_up), now);
    connection.host->given_up.Add(static_cast<double>(given_up), now);
  }
  held_ += connection.guard.held() - connection.held;
  connection.held = connection.guard.held();
}

void Door::Introduce(Connection& connection) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
    ++counts_->turned_away;
    connection.over = true;
    return;
  }
  connection.inner = pair[0];
  connection.adopted = pair[1];
  connection.deadline = SteadyClock::time_point::max();
  {
    MutexLock lock(mutex_);
    peers_[pair[1]] = connection.peer;
  }
  adopt_(pair[1]);
}

void Door::Flush(Connection& connection) {
  while (connection.inner >= 0 && !connection.server_ended && !connection.to_server.empty()) {
    const std::string_view rest = connection.to_server.rest();
    const ssize_t count = send(connection.inner, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count > 0) {
      connection.to_server.Sent(static_cast<size_t>(count));
    } else {
      if (errno != EAGAIN && errno != EINTR) connection.server_ended = true;
      break;
    }
  }
  bool broken = false;
  while (!connection.to_client.empty() && !broken) {
    const std::string_view rest = connection.to_client.rest();
    const ssize_t count = connection.client.Write(rest.data(), rest.size());
    connection.writes = connection.client.events();
    broken = count < 0;
    if (count <= 0) break;
    connection.to_client.Sent(static_cast<size_t>(count));
  }
  if (connection.client_ended && (connection.to_server.empty() || connection.server_ended)) {
    if (connection.inner < 0 || broken) {
      connection.over = true;
    } else if (!connection.told) {
      connection.told = true;
      shutdown(connection.inner, SHUT_WR);
    }
  }
  connection.over |= broken;
  if (connection.client_ended || (connection.server_ended && connection.to_client.empty())) {
    connection.deadline = std::min(connection.deadline, SteadyClock::now() + kLastWords);
  }
  if (connection.server_ended && connection.to_client.empty()) {
    connection.ending = connection.client.End();
  }
}

void Door::Violated(Connection& connection, const absl::Status& reason) {
  ++counts_->violations;
  connection.to_client.end() += connection.guard.GoAway(reason);
  if (connection.inner >= 0) shutdown(connection.inner, SHUT_RDWR);
  connection.client_ended = connection.server_ended = connection.told = true;
  connection.deadline = SteadyClock::now() + kLastWords;
  Flush(connection);
}

void Door::LimitReceiving() {
  const std::string reason = Str("the server receives messages of more than ", limits_.receiving,
                                 " bytes together", limits_.http2.Named("--max-receive-memory"));
  while (held_ > limits_.receiving) {
    Connection& largest = *std::ranges::max_element(connections_, {}, [](const auto& connection) {
                             return connection.second->held;
                           })->second;
    if (!largest.guard.RefuseLargest(reason, largest.to_server.end(), largest.to_client.end())) {
      held_ -= largest.held;
      largest.held = 0;
      Violated(largest, absl::ResourceExhaustedError(reason));
      largest.over = true;
      continue;
    }
    Count(largest);
    Watch(largest);
  }
}

void Door::Watch(Connection& connection) {
  const auto arm = [&](int fd, uint64_t id, uint32_t wanted, uint32_t& armed) {
    if (fd < 0 || wanted == armed) return;
    epoll_event event{.events = wanted, .data = {.u64 = id}};
    // An event of no kind still reports errors: a descriptor that wants nothing is taken out.
    const int op = wanted == 0 ? EPOLL_CTL_DEL : armed == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    TREADLE_CHECK(epoll_ctl(epoll_, op, fd, &event) == 0);
    armed = wanted;
  };
  uint32_t client = 0, inner = 0;
  if (connection.ending) {
    client = EPOLLIN;
  } else {
    if (!connection.client_ended && connection.unread.empty() && !connection.to_server.full()) {
      client |= connection.reads;
    }
    if (!connection.to_client.empty()) {
      client |= connection.writes;
    } else if (connection.server_ended) {
      client |= connection.client.events();  // what saying goodbye waits for
    }
    if (!connection.server_ended) {
      if (!connection.to_client.full()) inner |= EPOLLIN;
      if (!connection.to_server.empty()) inner |= EPOLLOUT;
    }
  }
  arm(connection.client.fd(), connection.id, client, connection.client_events);
  arm(connection.inner, connection.id + 1, inner, connection.inner_events);
}

void Door::Sweep() {
  const auto now = SteadyClock::now();
  std::vector<uint64_t> over;
  for (const auto& [id, connection] : connections_) {
    if (!connection->ending && connection->inner >= 0) {
      connection->over |= !connection->guard.RefuseUnfinished(
          now - limits_.request_patience, connection->to_server.end(), connection->to_client.end());
      Count(*connection);
      if (!connection->unread.empty() && !connection->to_server.full()) Carry(*connection);
      Watch(*connection);
    }
    if (connection->over || now >= connection->deadline) over.push_back(id);
  }
  for (const uint64_t id : over) {
    if (!connections_[id]->ending) ++counts_->turned_away;
    Remove(id);
  }
  std::erase_if(hosts_, [&](const auto& entry) {
    return entry.second.connections == 0 && entry.second.given_up.At(now) == 0;
  });
}

}  // namespace treadle
