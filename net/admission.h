// Admission to a port: accepts its clients, plain or TLS, and limits how many there are, in total
// and of one address.
//
// At a limit somebody makes room, or the newcomer is closed at once. Running out of descriptors
// counts as a full house; where nobody makes room then, newcomers wait.
//
// Thread safety: the loop's thread, or before it runs.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "net/client_socket.h"
#include "net/event_loop.h"

namespace treadle {

struct Newcomer {
  std::unique_ptr<ClientSocket> socket;
  std::string host;  // its address: "127.0.0.1"
  std::string peer;  // "ipv4:127.0.0.1:40000"
};

class Admission {
 public:
  struct Limits {
    size_t connections;
    size_t per_address;  // of them
  };
  struct Options {
    Limits limits;
    size_t newcomers = 16;           // that enter in one turn of the loop
    const SocketTls* tls = nullptr;  // must outlive this; null: plaintext
    // Closes a connection of that address, and says so by Leave. False: none may go.
    std::function<bool(const std::string& host)> make_room;
    std::function<void(Newcomer)> enter;
    std::function<void()> turned_away = [] {};  // a newcomer
    // Looks at deadlines: every so often, while there are connections.
    std::chrono::milliseconds sweep_every;
    std::function<void()> sweep;
  };

  static constexpr size_t kMinConnections = 4;  // however few files the process may open
  // Descriptors that admission holds beside the connections': its listener's.
  static constexpr size_t kFiles = 1;

  // Lets the process open `files` more for each connection and `others` besides, as far as it may;
  // gives the limits for which what it may open suffices, but for kMinConnections.
  static Limits Affordable(Limits limits, size_t files, size_t others);

  // Owns `listener`.
  Admission(EventLoop& loop, int listener, Options options);
  ~Admission();

  // Clients come in from now on; those who came before this have waited.
  void Open();
  // Nobody does any more.
  void Close();
  // A connection of that address is gone.
  void Leave(const std::string& host);

 private:
  bool Accept();  // false: there is nobody else now
  bool MakeRoom(const std::string& host);
  bool MakeRoomAnywhere();
  void Sweep();

  EventLoop& loop_;
  const int listener_;
  const Options options_;
  EventLoop::Watch watch_;
  bool open_ = false;
  bool sweeping_ = false;
  size_t connections_ = 0;
  std::map<std::string, size_t> of_host_;
};

}  // namespace treadle
