// A gRPC server whose only port is a Door.
//
// Thread safety: as Door's.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "net/door.h"

namespace grpc {
class Server;
class ServerBuilder;
}  // namespace grpc

namespace treadle {

class GuardedServer {
 public:
  // Builds the server, with the limits as its own too, and listens on `listen` (host:port; port 0
  // takes a free one); `tls` must outlive it; null: plaintext. Unavailable names the address if it
  // is taken.
  static absl::StatusOr<std::unique_ptr<GuardedServer>> Listen(grpc::ServerBuilder& builder,
                                                               const std::string& listen,
                                                               const DoorLimits& limits,
                                                               const SocketTls* tls);
  ~GuardedServer();

  // Clients come in from now on.
  void Open();

  const Address& address() const { return address_; }
  grpc::Server& server() { return *server_; }
  const Door& door() const { return *door_; }

  // The address of a call, by what gRPC calls its peer: "ipv4:127.0.0.1:40000".
  std::string PeerOf(std::string_view grpc_peer) const;

  // Calls may end for so long; then they are cut off, and the port closes.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  GuardedServer() = default;

  Address address_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Door> door_;  // hands connections to the server, so it goes first
};

}  // namespace treadle
