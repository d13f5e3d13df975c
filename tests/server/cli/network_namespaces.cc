#include "tests/server/cli/network_namespaces.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/status.h"
#include "tests/server/cli/child_process.h"

namespace treadle {
namespace {

constexpr const char* kIpPrograms[] = {"/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip", "/bin/ip"};

}  // namespace

absl::StatusOr<std::unique_ptr<NetworkNamespace>> NetworkNamespace::Create() {
  int file = -1;
  int error = 0;
  std::thread([&] {
    if (unshare(CLONE_NEWNET) == 0) file = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    error = errno;
  }).join();
  if (file < 0) {
    return absl::PermissionDeniedError(
        Str("no network namespace of one's own: ", std::strerror(error)));
  }
  return std::unique_ptr<NetworkNamespace>(new NetworkNamespace(file));
}

NetworkNamespace::~NetworkNamespace() { close(file_); }

std::string NetworkNamespace::path() const { return Str("/proc/", getpid(), "/fd/", file_); }

void NetworkNamespace::Enter() const { TREADLE_CHECK(setns(file_, CLONE_NEWNET) == 0); }

void NetworkNamespace::Run(const std::function<void()>& work) const {
  std::thread([&] {
    Enter();
    work();
  }).join();
}

absl::Status NetworkNamespace::Ip(const std::vector<std::string>& arguments) const {
  std::vector<std::string> command;
  for (const char* program : kIpPrograms) {
    if (command.empty() && access(program, X_OK) == 0) command = {program};
  }
  if (command.empty()) return absl::UnimplementedError("there is no `ip` (package iproute2)");
  std::string text = "ip";
  for (const std::string& argument : arguments) {
    command.push_back(argument);
    text += " " + argument;
  }
  absl::Status status;
  Run([&] {
    ChildProcess ip(command);
    if (ip.Wait() != 0) status = absl::UnimplementedError(Str("`", text, "`: ", ip.output()));
  });
  return status;
}

absl::StatusOr<NetworkOfHosts> NetworkOfHosts::Create(int hosts) {
  NetworkOfHosts network;
  TREADLE_ASSIGN_OR_RETURN(network.hub_, NetworkNamespace::Create());
  const NetworkNamespace& hub = *network.hub_;
  TREADLE_RETURN_IF_ERROR(hub.Ip({"link", "set", "lo", "up"}));
  TREADLE_RETURN_IF_ERROR(hub.Ip({"link", "add", "bridge0", "type", "bridge"}));
  TREADLE_RETURN_IF_ERROR(hub.Ip({"address", "add", "10.77.0.1/24", "dev", "bridge0"}));
  TREADLE_RETURN_IF_ERROR(hub.Ip({"link", "set", "bridge0", "up"}));
  for (int host = 0; host < hosts; ++host) {
    TREADLE_ASSIGN_OR_RETURN(network.hosts_.emplace_back(), NetworkNamespace::Create());
    TREADLE_RETURN_IF_ERROR(network.Join(host));
  }
  return network;
}

absl::Status NetworkOfHosts::Join(int host) {
  const NetworkNamespace& inside = *hosts_[host];
  const std::string port = Str("port", host);
  TREADLE_RETURN_IF_ERROR(hub_->Ip(
      {"link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", inside.path()}));
  TREADLE_RETURN_IF_ERROR(hub_->Ip({"link", "set", port, "master", "bridge0"}));
  TREADLE_RETURN_IF_ERROR(inside.Ip({"link", "set", "lo", "up"}));
  TREADLE_RETURN_IF_ERROR(inside.Ip({"address", "add", Address(host) + "/24", "dev", "eth0"}));
  TREADLE_RETURN_IF_ERROR(inside.Ip({"link", "set", "eth0", "up"}));
  return SetLink(host, true);
}

std::string NetworkOfHosts::Address(int host) { return Str("10.77.0.", host + 2); }

absl::Status NetworkOfHosts::SetLink(int host, bool up) const {
  return hub_->Ip({"link", "set", Str("port", host), up ? "up" : "down"});
}

}  // namespace treadle
