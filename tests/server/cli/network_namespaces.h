// Hosts of a test's own: network namespaces of this process, joined by a bridge.
//
// They have no names and no files: they go with this process and its children, whatever ends it.
// Thread safety: one thread.
#pragma once

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

// Hosts in a star: the hub has the address 10.77.0.1, host i the address 10.77.0.(i + 2) on its
// interface "eth0".
class NetworkOfHosts {
 public:
  static absl::StatusOr<NetworkOfHosts> Create(int hosts);

  const NetworkNamespace& hub() const { return *hub_; }
  const NetworkNamespace& host(int i) const { return *hosts_[i]; }
  static std::string Address(int host);
  // Cuts a host off, or joins it again.
  absl::Status SetLink(int host, bool up) const;

 private:
  absl::Status Join(int host);

  std::unique_ptr<NetworkNamespace> hub_;
  std::vector<std::unique_ptr<NetworkNamespace>> hosts_;
};

}  // namespace treadle
