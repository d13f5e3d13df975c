#include "net/guarded_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>

#include <algorithm>
#include <limits>

#include "base/number.h"
#include "base/status.h"

namespace treadle {
namespace {

// For what the server said last to reach its clients.
constexpr std::chrono::milliseconds kLastBytes{200};

}  // namespace

absl::StatusOr<std::unique_ptr<GuardedServer>> GuardedServer::Listen(grpc::ServerBuilder& builder,
                                                                     const std::string& listen,
                                                                     const DoorLimits& limits,
                                                                     const SocketTls* tls) {
  std::unique_ptr<GuardedServer> self(new GuardedServer);
  TREADLE_ASSIGN_OR_RETURN(self->address_, ParseAddress(listen));
  builder.SetMaxReceiveMessageSize(static_cast<int>(
      std::min<uint64_t>(limits.http2.message_bytes, std::numeric_limits<int>::max())));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             static_cast<int>(limits.http2.streams));
  // The door limits pings (Http2Guard).
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  // The door refuses compressed messages; this tells clients beforehand.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  self->server_ = builder.BuildAndStart();
  if (!self->server_) return absl::InternalError("gRPC does not start its server");
  TREADLE_ASSIGN_OR_RETURN(self->door_, Door::Listen(self->address_, limits, tls));
  return self;
}

void GuardedServer::Open() {
  door_->Open([server = server_.get()](int fd) { grpc::AddInsecureChannelFromFd(server, fd); });
}

std::string GuardedServer::PeerOf(std::string_view grpc_peer) const {
  // gRPC's name of a connection that it was given as a descriptor.
  constexpr std::string_view kPrefix = "fd:";
  if (!grpc_peer.starts_with(kPrefix)) return std::string(grpc_peer);
  return door_->Peer(NumberIn<int>(grpc_peer.substr(kPrefix.size())).value_or(-1));
}

void GuardedServer::Shutdown(std::chrono::milliseconds grace) {
  if (!server_) return;
  server_->Shutdown(std::chrono::system_clock::now() + grace);
  if (door_) door_->Close(kLastBytes);
  server_->Wait();
}

GuardedServer::~GuardedServer() { Shutdown(std::chrono::milliseconds(0)); }

}  // namespace treadle
