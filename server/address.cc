#include "server/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>

#include "kernels/status.h"

namespace treadle {

absl::StatusOr<Address> ParseAddress(const std::string& text) {
  const size_t colon = text.rfind(':');
  Address address;
  if (colon != std::string::npos && colon > 0) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, address.port);
    address.host = text.substr(0, colon);
    const bool bracketed = address.host.starts_with("[") && address.host.ends_with("]");
    if (bracketed) address.host = address.host.substr(1, address.host.size() - 2);
    const bool bare_v6 = !bracketed && address.host.find(':') != std::string::npos;
    if (error == std::errc() && stop == end && colon + 1 < text.size() && address.port >= 0 &&
        address.port <= 65535 && !address.host.empty() && !bare_v6) {
      return address;
    }
  }
  return InvalidArgument("address is '", text, "', expected host:port or [v6]:port");
}

std::string ToString(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? Str("[", address.host, "]:", address.port) : Str(address.host, ":", address.port);
}

absl::Status ProbeListen(const Address& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  if (int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(
        Str("cannot listen on ", ToString(address), ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  const int fd = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, found->ai_protocol);
  int error = fd < 0 ? errno : 0;
  if (fd >= 0) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, found->ai_addr, found->ai_addrlen) != 0 || listen(fd, 1) != 0) error = errno;
    close(fd);
  }
  if (error != 0) {
    return absl::UnavailableError(
        Str("cannot listen on ", ToString(address), ": ", std::strerror(error)));
  }
  return absl::OkStatus();
}

}  // namespace treadle
