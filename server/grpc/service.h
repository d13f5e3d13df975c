// The gRPC server, on one address: treadle.v1.Inference, what gateways speak (server/gateway/),
// grpc.health.v1 and reflection.
//
// Thread safety: all methods from the owner's thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "net/door.h"
#include "server/access/api_keys.h"
#include "server/observe/health.h"
#include "server/observe/ledger_follower.h"
#include "server/observe/log_event.h"
#include "server/observe/metrics.h"
#include "server/serving_stack.h"
#include "server/session/session.h"
#include "server/session/work_pool.h"

namespace treadle {

struct ServiceOptions {
  std::string listen = "127.0.0.1:0";  // host:port; port 0 takes a free one
  int32_t default_max_new_tokens = 512;
  Pooling pooling = Pooling::kNone;  // of embeddings
  Speculate speculate = Speculate::kNgram;
  std::chrono::milliseconds stream_stall_timeout{60'000};
  DoorLimits limits;
  WorkPool::Limits work;
  const SocketTls* tls = nullptr;            // must outlive the server; null: plaintext
  const ApiKeys* keys = nullptr;             // must outlive the server; null: everybody may call
  RequestStore* store = nullptr;             // must outlive the server; null: nothing is stored
  LogSink request_log = {};                  // an event for each request; or empty
  std::shared_ptr<HealthBoard> health = {};  // where readiness is shown, too; null: here only
  std::function<void()> on_ready = {};  // the first time, on a thread of the server's; or empty
  bool warm_up = true;  // ready only after a token; false: as soon as the engine stands
};

class InferenceServer {
 public:
  // Listens. The probes (health.h) say `started` from now on, and `ready` once a first token
  // has come out of the engine; every call but theirs needs one of `keys`, if given. `stack`
  // (started) and `follower` must outlive the server. Unavailable names the address if it is taken.
  static absl::StatusOr<std::unique_ptr<InferenceServer>> Start(ServingStack& stack,
                                                                LedgerFollower& follower,
                                                                const ServiceOptions& options);
  ~InferenceServer();

  // With the port that was taken.
  const Address& address() const;
  // At once, at most: fewer than asked for where the process may not open as many files.
  size_t connections() const;
  // For another front end beside gRPC, which must have ended before this does.
  SessionEnvironment& sessions();
  // Adds the counts of the port and of the threads that read requests.
  void AddTo(Metrics& metrics) const;

  // Not ready any more, new requests get UNAVAILABLE, accepted ones go on; at the end of
  // `timeout` the rest ends UNAVAILABLE. Then all listeners close. False if some request was cut
  // off.
  bool DrainAndStop(std::chrono::milliseconds timeout);

 private:
  struct State;
  explicit InferenceServer(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace treadle
