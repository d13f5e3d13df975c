#include "net/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

#include "base/number.h"
#include "base/status.h"

namespace treadle {

absl::StatusOr<Address> ParseAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon != std::string::npos && colon > 0) {
    const std::optional<int> port = NumberIn<int>(std::string_view(text).substr(colon + 1));
    Address address{.host = text.substr(0, colon), .port = port.value_or(-1)};
    const bool bracketed = address.host.starts_with("[") && address.host.ends_with("]");
    if (bracketed) address.host = address.host.substr(1, address.host.size() - 2);
    const bool bare_v6 = !bracketed && address.host.find(':') != std::string::npos;
    if (address.port >= 0 && address.port <= 65535 && !address.host.empty() && !bare_v6) {
      return address;
    }
  }
  return InvalidArgument("address is '", text, "', expected host:port or [v6]:port");
}

std::string ToString(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? Str("[", address.host, "]:", address.port) : Str(address.host, ":", address.port);
}

bool IsLoopback(std::string_view host) {
  if (host == "localhost" || host == "::1") return true;
  return host.starts_with("127.") && host.find_first_not_of("0123456789.") == host.npos;
}

absl::StatusOr<int> OpenListener(Address& address) {
  const auto cannot = [&](const char* reason) {
    return absl::UnavailableError(Str("cannot listen on ", ToString(address), ": ", reason));
  };
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return cannot(gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  const int fd = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                        found->ai_protocol);
  if (fd < 0) return cannot(std::strerror(errno));
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_storage taken{};
  socklen_t size = sizeof taken;
  if (bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&taken), &size) != 0) {
    const int error = errno;
    close(fd);
    return cannot(std::strerror(error));
  }
  address.port =
      ntohs(taken.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(taken).sin6_port
                                        : reinterpret_cast<const sockaddr_in&>(taken).sin_port);
  return fd;
}

absl::Status ProbeListen(const Address& address) {
  Address copy = address;
  TREADLE_ASSIGN_OR_RETURN(const int fd, OpenListener(copy));
  close(fd);
  return absl::OkStatus();
}

}  // namespace treadle
