#include "net/door.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kBuffer = 256 << 10;   // of one direction; fuller ones are not read into
constexpr size_t kOwnDescriptors = 64;  // files, engine, log: what the process needs besides
constexpr std::chrono::milliseconds kSweep{500};        // between two looks at deadlines
constexpr std::chrono::milliseconds kLastWords{2'000};  // for the client to close, once told
constexpr int kMaxDiscarded = 64;  // reads of what a client still sends meanwhile
// Calls that are given up before they are answered: far more than people and their timeouts do.
constexpr double kMaxGivenUp = 250, kMaxGivenUpOfHost = 1000;         // at once
constexpr double kGivenUpASecond = 100, kGivenUpOfHostASecond = 200;  // later
constexpr double kFewCalls = 16;  // of each connection of an address that gave up too many

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

DoorLimits Affordable(DoorLimits limits) {
  const auto [connections, per_address] = Admission::Affordable(
      {limits.connections, limits.per_address}, Door::kFilesEach, kOwnDescriptors);
  limits.connections = connections;
  limits.per_address = per_address;
  return limits;
}

}  // namespace

struct Door::Connection {
  Connection(Door& door, uint64_t age, Newcomer newcomer, std::shared_ptr<Forgotten> of_host)
      : id(age),
        client(std::move(newcomer.socket)),
        host(std::move(newcomer.host)),
        peer(std::move(newcomer.peer)),
        guard(door.limits_.http2,
              [&door](CallRefusal why) { ++door.counts_->refused[static_cast<size_t>(why)]; }),
        host_given_up(std::move(of_host)),
        client_watch(door.loop_, client->fd(), [this, &door] { door.Serve(*this); }) {}
  ~Connection() {
    inner_watch.reset();
    if (inner >= 0) close(inner);
  }

  const uint64_t id;
  const std::unique_ptr<ClientSocket> client;
  const std::string host, peer;
  Http2Guard guard;
  std::string unread;  // of the client, for the guard
  Forgotten given_up{kGivenUpASecond};
  const std::shared_ptr<Forgotten> host_given_up;  // by all of its address
  uint64_t counted_given_up = 0;                   // of the guard's
  int inner = -1;                                  // our end of the socket to the server
  int adopted = -1;                                // the server's
  Bytes to_server, to_client;
  SteadyClock::time_point deadline = SteadyClock::time_point::max();
  short reads = EPOLLIN, writes = EPOLLOUT;  // what a read and a write of the client's wait for
  uint64_t held = 0;                         // as counted in the door's
  bool client_ended = false;                 // will say nothing more
  bool server_ended = false;
  bool told = false;    // the server knows that its client has ended
  bool ending = false;  // all has been said: waits for the client to close
  int discarded = 0;    // reads since then
  bool over = false;
  EventLoop::Watch client_watch;
  std::optional<EventLoop::Watch> inner_watch;
};

Door::Door(int listener, const DoorLimits& limits, const SocketTls* tls)
    : limits_(Affordable(limits)),
      admission_(loop_, listener,
                 {.limits = {limits_.connections, limits_.per_address},
                  .tls = tls,
                  .make_room = [this](const std::string& host) { return MakeRoom(host); },
                  .enter = [this](Newcomer newcomer) { Enter(std::move(newcomer)); },
                  .turned_away = [this] { ++counts_->turned_away; },
                  .sweep_every = kSweep,
                  .sweep = [this] { Sweep(); }}) {}

absl::StatusOr<std::unique_ptr<Door>> Door::Listen(Address& address, const DoorLimits& limits,
                                                   const SocketTls* tls) {
  TREADLE_ASSIGN_OR_RETURN(const int listener, OpenListener(address));
  return std::unique_ptr<Door>(new Door(listener, limits, tls));
}

Door::~Door() { Close(std::chrono::milliseconds(0)); }

void Door::Open(Adopt adopt) {
  adopt_ = std::move(adopt);
  admission_.Open();
  thread_ = std::thread([this] { loop_.Run(); });
}

void Door::Close(std::chrono::milliseconds grace) {
  if (!thread_.joinable()) return;
  loop_.Post([this, grace] {
    admission_.Close();
    until_ = SteadyClock::now() + grace;
    loop_.After(grace, [this] { EndIfSpoken(); });
    EndIfSpoken();
  });
  thread_.join();
  while (!connections_.empty()) Remove(connections_.begin()->first);
  counts_->held = 0;
}

void Door::EndIfSpoken() {
  if (until_ == SteadyClock::time_point::max()) return;
  const bool spoken = std::ranges::all_of(connections_, [](const auto& connection) {
    return connection.second->inner < 0 || connection.second->ending;
  });
  if (spoken || SteadyClock::now() >= until_) loop_.Stop();
}

std::string Door::Peer(int fd) const {
  MutexLock lock(mutex_);
  const auto peer = peers_.find(fd);
  return peer == peers_.end() ? "" : peer->second;
}

void Door::Enter(Newcomer newcomer) {
  std::shared_ptr<Forgotten>& of_host = given_up_[newcomer.host];
  if (of_host == nullptr) of_host = std::make_shared<Forgotten>(kGivenUpOfHostASecond);
  auto connection = std::make_unique<Connection>(*this, next_, std::move(newcomer), of_host);
  connection->deadline = SteadyClock::now() + limits_.patience;
  Watch(*connection);
  connections_.emplace(next_++, std::move(connection));
  ++counts_->connections;
}

bool Door::MakeRoom(const std::string& host) {
  const auto idle = std::ranges::find_if(connections_, [&](const auto& entry) {
    const Connection& one = *entry.second;
    if (one.host != host || one.guard.streams() > 0) return false;
    // It may be about to call; where it is read slowly, or no more, its bytes do not count.
    return one.ending || !one.unread.empty() || !HasUnread(one.client->fd());
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
  counts_->held = static_cast<int64_t>(held_);
  connection.host_given_up->Add(static_cast<double>(connection.guard.unanswered()),
                                SteadyClock::now());
  --counts_->connections;
  admission_.Leave(connection.host);
  connections_.erase(found);
}

void Door::Serve(Connection& connection) {
  Carry(connection);
  if (connection.over) Remove(connection.id);
  EndIfSpoken();
}

void Door::Carry(Connection& connection) {
  if (connection.ending) {
    connection.over = !connection.client->Discard() || ++connection.discarded > kMaxDiscarded;
    return;
  }
  if (Read(connection)) Flush(connection);
  Watch(connection);
}

// Reads from either side; false: the connection was ended for it.
bool Door::Read(Connection& connection) {
  char buffer[64 << 10];
  static_assert(sizeof buffer >= ClientSocket::kReadSize);
  if (!connection.unread.empty()) {
    const std::string unread = std::exchange(connection.unread, {});
    if (!Take(connection, unread)) return false;
  } else if (!connection.client_ended && !connection.to_server.full()) {
    const ssize_t count = connection.client->Read(buffer);
    connection.reads = connection.client->events();
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
  const double allowed = kMaxGivenUp - connection.given_up.At(now);
  if (connection.host_given_up->At(now) < kMaxGivenUpOfHost) return allowed;
  return std::min(allowed, kFewCalls - static_cast<double>(connection.guard.unanswered()));
}

void Door::Count(Connection& connection) {
  const uint64_t given_up = connection.guard.given_up() - connection.counted_given_up;
  if (given_up > 0) {
    const auto now = SteadyClock::now();
    connection.counted_given_up += given_up;
    connection.given_up.Add(static_cast<double>(given_up), now);
    connection.host_given_up->Add(static_cast<double>(given_up), now);
  }
  held_ += connection.guard.held() - connection.held;
  connection.held = connection.guard.held();
  counts_->held = static_cast<int64_t>(held_);
}

void Door::Introduce(Connection& connection) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) != 0) {
    ++counts_->turned_away;
    connection.over = true;
    return;
  }
  connection.inner = pair[0];
  connection.inner_watch.emplace(loop_, pair[0], [this, &connection] { Serve(connection); });
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
    const ssize_t count = connection.client->Write(rest.data(), rest.size());
    connection.writes = connection.client->events();
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
    connection.ending = connection.client->End();
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
      client |= connection.client->events();  // what saying goodbye waits for
    }
    if (!connection.server_ended) {
      if (!connection.to_client.full()) inner |= EPOLLIN;
      if (!connection.to_server.empty()) inner |= EPOLLOUT;
    }
  }
  connection.client_watch.For(client);
  if (connection.inner_watch) connection.inner_watch->For(inner);
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
  std::erase_if(given_up_, [&](const auto& entry) {
    return entry.second.use_count() == 1 && entry.second->At(now) == 0;
  });
  EndIfSpoken();
}

}  // namespace treadle
