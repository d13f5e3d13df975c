#include "net/admission.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr std::chrono::milliseconds kUntilFilesAreFree{50};

// Fills in who is at the other end.
void Name(const sockaddr_storage& address, socklen_t size, Newcomer& newcomer) {
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host, sizeof host, port,
              sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  newcomer.host = host;
  newcomer.peer = address.ss_family == AF_INET6 ? Str("ipv6:[", host, "]:", port)
                                                : Str("ipv4:", host, ":", port);
}

}  // namespace

Admission::Limits Admission::Affordable(Limits limits, size_t files, size_t others) {
  rlimit may{};
  if (getrlimit(RLIMIT_NOFILE, &may) == 0) {
    may.rlim_cur =
        std::min<rlim_t>(may.rlim_cur + limits.connections * files + others, may.rlim_max);
    setrlimit(RLIMIT_NOFILE, &may);
    getrlimit(RLIMIT_NOFILE, &may);
    const size_t most = may.rlim_cur > others ? (may.rlim_cur - others) / files : 0;
    limits.connections = std::min(limits.connections, std::max(most, kMinConnections));
  }
  limits.per_address = std::min(limits.per_address, limits.connections);
  return limits;
}

Admission::Admission(EventLoop& loop, int listener, Options options)
    : loop_(loop),
      listener_(listener),
      options_(std::move(options)),
      watch_(loop, listener, [this] {
        // Others are heard in between, so that nobody who asks seems silent.
        for (size_t i = 0; i < options_.newcomers && Accept(); ++i) {
        }
      }) {}

Admission::~Admission() {
  Close();
  close(listener_);
}

void Admission::Open() {
  open_ = true;
  watch_.For(EPOLLIN);
}

void Admission::Close() {
  open_ = false;
  watch_.For(0);
}

void Admission::Leave(const std::string& host) {
  --connections_;
  const auto of_host = of_host_.find(host);
  if (--of_host->second == 0) of_host_.erase(of_host);
  if (open_) watch_.For(EPOLLIN);
}

bool Admission::Accept() {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  const int fd =
      accept4(listener_, reinterpret_cast<sockaddr*>(&from), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) {
      return errno == EINTR || errno == ECONNABORTED;
    }
    if (MakeRoomAnywhere()) return true;
    // The connection stays pending; no spinning on it.
    watch_.For(0);
    loop_.After(kUntilFilesAreFree, [this] {
      if (open_) watch_.For(EPOLLIN);
    });
    return false;
  }
  Newcomer newcomer;
  Name(from, size, newcomer);
  TlsSession tls;
  if (!MakeRoom(newcomer.host) ||
      (options_.tls != nullptr && !(tls = options_.tls->NewSession(fd)))) {
    options_.turned_away();
    close(fd);
    return true;
  }
  const int at_once = 1;  // an answer is several writes: none shall wait for an acknowledgement
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  newcomer.socket = std::make_unique<ClientSocket>(fd, std::move(tls));
  ++connections_;
  ++of_host_[newcomer.host];
  options_.enter(std::move(newcomer));
  if (!std::exchange(sweeping_, true)) loop_.After(options_.sweep_every, [this] { Sweep(); });
  return true;
}

void Admission::Sweep() {
  sweeping_ = connections_ > 0;
  if (!sweeping_) return;
  options_.sweep();
  loop_.After(options_.sweep_every, [this] { Sweep(); });
}

// For one more of `host`.
bool Admission::MakeRoom(const std::string& host) {
  const auto of_host = of_host_.find(host);
  if (of_host != of_host_.end() && of_host->second >= options_.limits.per_address) {
    return options_.make_room(host);
  }
  return connections_ < options_.limits.connections || MakeRoomAnywhere();
}

// From the address that has most connections.
bool Admission::MakeRoomAnywhere() {
  const auto most =
      std::ranges::max_element(of_host_, {}, [](const auto& entry) { return entry.second; });
  // A copy: the entry goes with its last connection.
  return most != of_host_.end() && options_.make_room(std::string(most->first));
}

}  // namespace treadle
