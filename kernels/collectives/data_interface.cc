// Finds the address of this machine that the data plane listens on.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "base/status.h"
#include "kernels/collectives/gloo_communicator.h"

namespace treadle {
namespace {

struct LocalAddress {
  std::string interface;
  std::string address;  // numeric
};

std::string Numeric(const sockaddr* address) {
  const socklen_t length =
      address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char text[NI_MAXHOST] = {};
  const int error = getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text : "";
}

// IPv4 first, in the kernel's order.
absl::StatusOr<std::vector<LocalAddress>> LocalAddresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    return Internal("cannot list this machine's network interfaces: ", std::strerror(errno));
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<LocalAddress> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != family) continue;
      addresses.push_back({entry->ifa_name, Numeric(entry->ifa_addr)});
    }
  }
  return addresses;
}

// The addresses that `name` may stand for: itself, and what it resolves to.
std::vector<std::string> Candidates(const std::string& name) {
  std::vector<std::string> candidates = {name};
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &list) != 0) return candidates;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET || entry->ai_family == AF_INET6) {
      candidates.push_back(Numeric(entry->ai_addr));
    }
  }
  return candidates;
}

// All of 127.0.0.0/8 is this machine, though only one address of it is listed.
bool IsLoopback(const std::string& address) {
  in_addr ip = {};
  return inet_pton(AF_INET, address.c_str(), &ip) == 1 && ntohl(ip.s_addr) >> 24 == 127;
}

}  // namespace

absl::StatusOr<std::string> ResolveDataInterface(const std::string& name) {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<LocalAddress> local, LocalAddresses());
  for (const LocalAddress& entry : local) {
    if (entry.interface == name) return entry.address;
  }
  for (const std::string& candidate : Candidates(name)) {
    const auto same = [&](const LocalAddress& entry) { return entry.address == candidate; };
    if (IsLoopback(candidate) || std::any_of(local.begin(), local.end(), same)) return candidate;
  }
  std::string known;
  for (const LocalAddress& entry : local) {
    known += Str(known.empty() ? "" : ", ", entry.interface, " (", entry.address, ")");
  }
  return InvalidArgument(
      "data interface '", name,
      "' is neither an interface nor an address of this machine, which has: ", known);
}

}  // namespace treadle
