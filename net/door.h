// The port of a gRPC server: accepts its connections, plain or TLS, and hands them over.
//
// One thread carries bytes between each client and the server, through an Http2Guard. A connection
// reaches the server once it has said that it speaks HTTP/2, within `patience` of its accept. The
// total that they may take is limited: connections (net/admission.h), where the oldest
// one without an open call and without unread bytes makes room, and bytes of messages that are not
// whole, of which the largest ends.
//
// A call costs its client less than the server, if it is given up at once (CVE-2023-44487). So a
// connection that gives up calls faster than people do is read more slowly, and where all of an
// address do, each of its connections may have few calls that are not answered.
//
// Thread safety: Listen, Open, Close and destruction from the owner's thread; the rest from any.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "net/address.h"
#include "net/admission.h"
#include "net/event_loop.h"
#include "net/http2_guard.h"

namespace treadle {

struct DoorLimits {
  size_t connections = 1024;      // each takes Door::kFilesEach descriptors
  size_t per_address = 512;       // of them
  uint64_t receiving = 32 << 20;  // bytes of messages that are not whole, of all connections
  std::chrono::milliseconds patience{10'000};          // until a connection speaks HTTP/2
  std::chrono::milliseconds request_patience{60'000};  // until a call's request is whole
  Http2Guard::Limits http2;
  bool operator==(const DoorLimits&) const = default;
};

class Door {
 public:
  static constexpr size_t kFilesEach = 3;  // the client's socket, both ends of that to the server
  // Open at once, at least.
  static constexpr size_t kMinFiles =
      Admission::kFiles + EventLoop::kFiles + Admission::kMinConnections * kFilesEach;

  struct Counts {
    std::atomic<int64_t> connections{0};            // now
    std::atomic<int64_t> turned_away{0};            // closed for a limit or their silence, so far
    std::atomic<int64_t> violations{0};             // closed for what they sent, so far
    std::atomic<int64_t> held{0};                   // bytes of messages that are not whole, now
    std::array<std::atomic<int64_t>, 4> refused{};  // calls, so far, by CallRefusal
  };
  // Gives the server a connected socket, which it owns from then on; on the door's thread.
  using Adopt = std::function<void(int fd)>;

  // Listens there; `address` gets the port that was taken. `tls` must outlive the door; null:
  // plaintext. Unavailable says why the address cannot be had.
  static absl::StatusOr<std::unique_ptr<Door>> Listen(Address& address, const DoorLimits& limits,
                                                      const SocketTls* tls);
  ~Door();

  // Clients come in from now on; those who came before this have waited.
  void Open(Adopt adopt);

  // Accepts nobody any more; what the server still says is carried until it has closed its ends,
  // for at most `grace`.
  void Close(std::chrono::milliseconds grace);

  // The other end of a connection that the server has, by the descriptor it got:
  // "ipv4:127.0.0.1:40000". Empty: nobody.
  std::string Peer(int fd) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::shared_ptr<const Counts> counts() const { return counts_; }
  // As asked for, but fewer connections where the process may not open as many files.
  const DoorLimits& limits() const { return limits_; }

 private:
  using SteadyClock = std::chrono::steady_clock;
  struct Connection;

  Door(int listener, const DoorLimits& limits, const SocketTls* tls);
  void Enter(Newcomer newcomer);
  bool MakeRoom(const std::string& host);
  // The connection's sockets are ready: carries bytes, and removes it at its end.
  void Serve(Connection& connection);
  void Carry(Connection& connection);
  bool Read(Connection& connection);
  bool Take(Connection& connection, std::string_view bytes);
  // How many calls it may begin now.
  double Allowed(const Connection& connection, SteadyClock::time_point now) const;
  void Count(Connection& connection);  // what its guard holds, and what was given up
  void Introduce(Connection& connection);
  void Flush(Connection& connection);
  void Violated(Connection& connection, const absl::Status& reason);
  void LimitReceiving();
  void Watch(Connection& connection);
  void Sweep();
  // At its end, once all has been said, or its time is over.
  void EndIfSpoken();
  void Remove(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);

  const DoorLimits limits_;
  Adopt adopt_;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
  // The thread's, while it runs.
  EventLoop loop_;
  Admission admission_;
  std::map<std::string, std::shared_ptr<Forgotten>> given_up_;   // calls, by address
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;  // by age
  uint64_t next_ = 1;
  uint64_t held_ = 0;
  SteadyClock::time_point until_ = SteadyClock::time_point::max();  // the end, once it closes
  mutable Mutex mutex_;
  std::map<int, std::string> peers_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace treadle
