#include "tests/server/cli/network_namespaces.h"

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
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

// Carries packets between the devices of the hosts (tun: whole IP packets without a link's frame).
class NetworkOfHosts::Router {
 public:
  ~Router() {
    const char stop = 0;
    if (thread_.joinable() && write(stop_[1], &stop, 1) == 1) thread_.join();
    for (const int file : {stop_[0], stop_[1]}) close(file);
    for (const pollfd& device : devices_) close(device.fd);
  }

  // A device in this thread's namespace, for the next host.
  absl::Status AddDevice() {
    const int file = open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    ifreq request{};
    std::strcpy(request.ifr_name, "eth0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    if (file >= 0) devices_.push_back({.fd = file, .events = POLLIN, .revents = 0});
    if (file >= 0 && ioctl(file, TUNSETIFF, &request) == 0) return absl::OkStatus();
    return absl::PermissionDeniedError(Str("no tunnel of one's own: ", std::strerror(errno)));
  }
  void Start() {
    TREADLE_CHECK(pipe2(stop_, O_CLOEXEC) == 0);
    thread_ = std::thread([this] { Run(); });
  }
  void SetRule(Rule rule) {
    const MutexLock lock(mutex_);
    rule_ = std::move(rule);
  }

 private:
  void Run() {
    std::vector<pollfd> waited = devices_;
    waited.push_back({.fd = stop_[0], .events = POLLIN, .revents = 0});
    std::vector<uint8_t> bytes;
    while (poll(waited.data(), waited.size(), -1) > 0 && waited.back().revents == 0) {
      for (size_t from = 0; from < devices_.size(); ++from) {
        bytes.resize(65536);
        const ssize_t count = read(devices_[from].fd, bytes.data(), bytes.size());
        if (count < kIpHeader || bytes[0] >> 4 != 4) continue;
        bytes.resize(static_cast<size_t>(count));
        Carry(static_cast<int>(from) - 1, bytes);
      }
    }
  }
  void Carry(int from, std::vector<uint8_t>& bytes) {
    Packet packet{.from = from, .to = bytes[19] - 2};  // the last byte of where it goes
    if (packet.to < kHub || packet.to + 1 >= static_cast<int>(devices_.size())) return;
    const size_t tcp = size_t{bytes[0]} % 16 * 4;
    size_t payload = bytes.size();
    if (bytes[9] == IPPROTO_TCP && bytes.size() >= tcp + kTcpHeader) {
      packet.from_port = Word(bytes, tcp);
      packet.to_port = Word(bytes, tcp + 2);
      payload = tcp + size_t{bytes[tcp + 12]} / 16 * 4;
      packet.bytes = bytes.size() - std::min(payload, bytes.size());
    }
    PacketFate fate = PacketFate::kPass;
    {
      const MutexLock lock(mutex_);
      if (rule_) fate = rule_(packet);
    }
    if (fate == PacketFate::kDrop) return;
    if (fate == PacketFate::kFlip && packet.bytes > 0) {
      Flip(bytes, payload + packet.bytes / 2, tcp + 16);
    }
    if (fate == PacketFate::kSwap && held_.empty()) {
      held_ = bytes;
      held_to_ = packet.to;
      return;
    }
    Send(packet.to, bytes);
    if (fate == PacketFate::kDuplicate) Send(packet.to, bytes);
    if (!held_.empty()) Send(held_to_, std::exchange(held_, {}));
  }
  // A full queue of the kernel's loses the packet, as networks do.
  void Send(int to, const std::vector<uint8_t>& bytes) const {
    if (write(devices_[to + 1].fd, bytes.data(), bytes.size()) < 0) return;
  }
  static uint16_t Word(const std::vector<uint8_t>& bytes, size_t at) {
    return static_cast<uint16_t>(bytes[at] << 8 | bytes[at + 1]);
  }
  // The checksum as RFC 1624 changes it with one word.
  static void Flip(std::vector<uint8_t>& bytes, size_t at, size_t checksum) {
    at -= at % 2;  // headers are whole words
    if (at + 1 >= bytes.size()) return;
    const uint32_t before = Word(bytes, at);
    bytes[at] ^= 0x10;
    uint32_t sum = (~Word(bytes, checksum) & 0xffffu) + (~before & 0xffffu) + Word(bytes, at);
    while (sum >> 16 != 0) sum = (sum & 0xffffu) + (sum >> 16);
    bytes[checksum] = static_cast<uint8_t>(~sum >> 8);
    bytes[checksum + 1] = static_cast<uint8_t>(~sum);
  }

  static constexpr ssize_t kIpHeader = 20;
  static constexpr size_t kTcpHeader = 20;

  std::vector<pollfd> devices_;  // the hub's first
  int stop_[2] = {-1, -1};

  Mutex mutex_;
  Rule rule_ ABSL_GUARDED_BY(mutex_);

  // The thread's own.
  std::vector<uint8_t> held_;
  int held_to_ = 0;

  std::thread thread_;
};

NetworkOfHosts::NetworkOfHosts() : router_(std::make_unique<Router>()) {}
NetworkOfHosts::NetworkOfHosts(NetworkOfHosts&&) noexcept = default;
NetworkOfHosts::~NetworkOfHosts() = default;

absl::StatusOr<NetworkOfHosts> NetworkOfHosts::Create(int hosts) {
  NetworkOfHosts network;
  for (int host = kHub; host < hosts; ++host) {
    TREADLE_ASSIGN_OR_RETURN(network.namespaces_.emplace_back(), NetworkNamespace::Create());
    const NetworkNamespace& inside = *network.namespaces_.back();
    absl::Status added;
    inside.Run([&] { added = network.router_->AddDevice(); });
    TREADLE_RETURN_IF_ERROR(added);
    TREADLE_RETURN_IF_ERROR(inside.Ip({"link", "set", "lo", "up"}));
    TREADLE_RETURN_IF_ERROR(inside.Ip({"address", "add", Address(host) + "/24", "dev", "eth0"}));
    TREADLE_RETURN_IF_ERROR(inside.Ip({"link", "set", "eth0", "up"}));
  }
  network.router_->Start();
  return network;
}

std::string NetworkOfHosts::Address(int host) { return Str("10.77.0.", host + 2); }

void NetworkOfHosts::SetRule(Rule rule) const { router_->SetRule(std::move(rule)); }

void NetworkOfHosts::SetLink(int host, bool up) const {
  SetRule(up ? Rule() : [host](const Packet& packet) {
    return packet.from == host || packet.to == host ? PacketFate::kDrop : PacketFate::kPass;
  });
}

}  // namespace treadle
