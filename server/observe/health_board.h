// What grpc.health.v1 says of this process, under three names with three meanings:
//
//   started  the weights are loaded and the server listens; true once and for all
//   ready    a real token has come out of the engine, its epoch stands, and nothing is draining
//   live     the serving loop turns; never the state of a worker or of another server
//
// "" and treadle.v1.Inference mean ready. Every other name is NOT_FOUND.
//
// Thread safety: all methods from any thread.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/door/guarded_server.h"

namespace grpc {
class CallbackGenericService;
class HealthCheckServiceInterface;
}  // namespace grpc

namespace treadle {

enum class Probe { kStarted, kReady, kLive };

class HealthBoard {
 public:
  HealthBoard() = default;
  HealthBoard(const HealthBoard&) = delete;
  HealthBoard& operator=(const HealthBoard&) = delete;

  void Set(Probe probe, bool serving) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Get(Probe probe) const ABSL_LOCKS_EXCLUDED(mutex_);

  // A gRPC server's health service shows the board from now on, until Detach.
  void Attach(grpc::HealthCheckServiceInterface& service) ABSL_LOCKS_EXCLUDED(mutex_);
  void Detach(grpc::HealthCheckServiceInterface& service) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  static void Show(grpc::HealthCheckServiceInterface& service, Probe probe, bool serving);

  mutable Mutex mutex_;
  // Before anything is loaded there is no loop that could hang.
  std::array<bool, 3> serving_ ABSL_GUARDED_BY(mutex_) = {false, false, true};
  std::vector<grpc::HealthCheckServiceInterface*> services_ ABSL_GUARDED_BY(mutex_);
};

// A plaintext port with grpc.health.v1 and nothing else: Kubernetes' probes speak no TLS.
class HealthServer {
 public:
  // Unavailable names the address if it is taken. `board` must outlive the server.
  static absl::StatusOr<std::unique_ptr<HealthServer>> Start(const std::string& listen,
                                                             HealthBoard& board);
  ~HealthServer();

  const Address& address() const { return server_->address(); }  // with the port that was taken

 private:
  explicit HealthServer(HealthBoard& board);

  HealthBoard& board_;
  // gRPC wants some service besides its own; this one answers UNIMPLEMENTED.
  const std::unique_ptr<grpc::CallbackGenericService> nothing_;
  std::unique_ptr<GuardedServer> server_;
};

}  // namespace treadle
