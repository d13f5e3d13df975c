// Hosts of a test's own: network namespaces of this process, between which this process carries
// every packet, or does not.
//
// They have no names and no files: they go with this process and its children, whatever ends it.
// Thread safety: one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

// One network namespace, as long as this object or a process in it lives.
class NetworkNamespace {
 public:
  // PermissionDenied or Unimplemented where the system does not allow it.
  static absl::StatusOr<std::unique_ptr<NetworkNamespace>> Create();
  ~NetworkNamespace();
  NetworkNamespace(const NetworkNamespace&) = delete;
  NetworkNamespace& operator=(const NetworkNamespace&) = delete;

  // The calling thread, and what it starts, is inside from here on.
  void Enter() const;
  // On a thread inside; processes that it starts are inside too.
  void Run(const std::function<void()>& work) const;
  // `ip` with these arguments, inside; its output is the error.
  absl::Status Ip(const std::vector<std::string>& arguments) const;
  std::string path() const;  // as `ip` takes it

 private:
  explicit NetworkNamespace(int file) : file_(file) {}
  const int file_;
};

// A packet on its way between hosts.
struct Packet {
  int from = 0, to = 0;                 // hosts; NetworkOfHosts::kHub
  uint16_t from_port = 0, to_port = 0;  // of TCP; 0: it is something else
  size_t bytes = 0;                     // that TCP carries
};

enum class PacketFate : uint8_t {
  kPass,
  kDrop,
  kDuplicate,
  kSwap,  // with the next one that passes
  kFlip,  // one bit in the middle of what TCP carries, whose checksum does not show it
};

// The hub has the address 10.77.0.1, host i the address 10.77.0.(i + 2) on its interface "eth0".
class NetworkOfHosts {
 public:
  static constexpr int kHub = -1;
  using Rule = std::function<PacketFate(const Packet&)>;

  static absl::StatusOr<NetworkOfHosts> Create(int hosts);
  ~NetworkOfHosts();
  NetworkOfHosts(NetworkOfHosts&&) noexcept;

  const NetworkNamespace& hub() const { return *namespaces_[0]; }
  const NetworkNamespace& host(int i) const { return *namespaces_[i + 1]; }
  static std::string Address(int host);
  // Decides about each packet from now on, on a thread of the network's. Empty: all pass.
  void SetRule(Rule rule) const;
  // Cuts a host off without a word, or joins it again; takes the rule's place.
  void SetLink(int host, bool up) const;

 private:
  class Router;
  NetworkOfHosts();

  std::vector<std::unique_ptr<NetworkNamespace>> namespaces_;  // the hub's first
  std::unique_ptr<Router> router_;
};

}  // namespace treadle
