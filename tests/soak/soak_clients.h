// Eight clients of a server that is being disturbed, four over gRPC and four over HTTP, each
// through a proxy. They ask for answers of every kind, give some of them up, want some of them too
// soon, and hold what they heard against the answer that nobody disturbed.
//
// Thread safety: one thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "tests/attacks/attacked_server.h"
#include "tests/server/cli/streamed_answers.h"
#include "tests/support/faults/byte_proxy.h"

namespace treadle {

class SoakClients {
 public:
  static constexpr int kEach = 4;  // clients of gRPC, and of HTTP

  // Asks for every kind of answer once, undisturbed.
  SoakClients(AttackedServer& server, uint64_t seed);
  ~SoakClients();

  void Begin();
  // No client asks for more, and none is left in the middle; false if that takes minutes.
  bool Rest() ABSL_LOCKS_EXCLUDED(mutex_);
  void GoOn() ABSL_LOCKS_EXCLUDED(mutex_);
  // One right answer over gRPC and one over HTTP, past the proxies; what was wrong, or "".
  std::string AskOnce();

  ByteProxy& grpc_proxy() { return grpc_proxy_; }
  ByteProxy& http_proxy() { return http_proxy_; }

  struct Counts {
    std::atomic<int64_t> right{0};     // whole answers
    std::atomic<int64_t> given_up{0};  // by their clients
    std::atomic<int64_t> too_late{0};  // ended by their deadlines
    std::atomic<int64_t> cut_off{0};   // by a proxy
    int64_t all() const { return right + given_up + too_late + cut_off; }
  };
  const Counts& counts() const { return counts_; }

 private:
  // How a client has heard the end.
  enum class End { kWhole, kGivenUp, kTooLate, kCut };
  struct Heard {
    End end = End::kCut;
    std::string why;  // kCut: what the client was told
    Said said;
  };
  // How many messages a client that gives up hears; -1: it does not. And how long it would wait.
  struct Patience {
    int messages = -1;
    std::chrono::milliseconds time = std::chrono::minutes(2);
  };

  static Heard AskGrpc(v1::Inference::Stub& stub, int kind, const Patience& patience);
  static Heard AskHttp(int port, int kind, const Patience& patience);
  void Run(bool grpc, uint64_t seed) ABSL_LOCKS_EXCLUDED(mutex_);
  void Judge(bool grpc, int kind, const Heard& heard, bool hurried, bool disturbed);
  const Said& Reference(bool grpc, int kind) const { return references_[grpc ? 0 : 1][kind]; }

  // Constant after construction.
  AttackedServer& server_;
  const uint64_t seed_;
  std::array<std::vector<Said>, 2> references_;  // of gRPC and HTTP, [kRequestKinds]
  std::vector<int> kinds_;                       // that this server has

  ByteProxy grpc_proxy_, http_proxy_;
  Counts counts_;

  Mutex mutex_;
  CondVar changed_;
  bool resting_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  int asking_ ABSL_GUARDED_BY(mutex_) = 0;

  std::vector<std::thread> threads_;
};

}  // namespace treadle
