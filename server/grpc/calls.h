// Parts that all gRPC services' calls need, and Inference's calls that are more than one answer at
// once: one object per call, gRPC's reactor, that lives until gRPC is done with it.
//
// Thread safety: the functions are called by gRPC's threads; each call's state is under its own
// mutex.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "base/status.h"
#include "net/guarded_server.h"
#include "server/grpc/wire_format.h"
#include "server/observe/ledger_follower.h"
#include "server/serving_stack.h"
#include "server/session/session.h"

namespace grpc {
class ByteBuffer;
class CallbackServerContext;
class ServerUnaryReactor;
template <class W>
class ServerWriteReactor;
}  // namespace grpc

namespace treadle {

// Services are raw: their messages are bytes (wire_format.h).
using grpc::ByteBuffer;
using RpcContext = grpc::CallbackServerContext;
using UnaryReactor = grpc::ServerUnaryReactor;
using StreamReactor = grpc::ServerWriteReactor<ByteBuffer>;

// The surroundings of every call on the server.
struct CallEnvironment {
  ServingStack& stack;
  LedgerFollower& follower;
  SessionEnvironment sessions;
  const GuardedServer* server = nullptr;  // for the names of peers
  std::atomic<bool> closing{false};       // ledger watchers end
  const Clock::time_point began = Clock::now();
};

// The call's bearer token, as it was sent; empty if there is none.
std::string_view Authorization(const RpcContext& context);
// The caller, by the call's metadata. The gRPC deadline is the request's deadline.
Caller CallerOf(const CallEnvironment& environment, const RpcContext& context);

using Answer = std::function<absl::Status()>;  // fills a response
// A call of one short answer, if the caller may call.
UnaryReactor* Reply(CallEnvironment& environment, RpcContext* context, const Answer& answer);
// The same for what is said in a message: it is parsed like those of long calls, once the caller
// may call.
template <typename Request, typename Response>
UnaryReactor* ReplyTo(CallEnvironment& environment, RpcContext* context, const ByteBuffer* request,
                      ByteBuffer* response,
                      const std::function<absl::Status(const Request&, Response*)>& answer,
                      const CheckEntries& check = {}) {
  return Reply(environment, context, [&]() -> absl::Status {
    Request asked;
    TREADLE_RETURN_IF_ERROR(ParseShort(*request, asked, check));
    Response reply;
    TREADLE_RETURN_IF_ERROR(answer(asked, &reply));
    *response = Serialize(reply);
    return absl::OkStatus();
  });
}
// The same as Reply on a thread of the work pool, and charged to the caller's key: for what takes
// long where the request, of so many bytes, is long.
UnaryReactor* Work(CallEnvironment& environment, RpcContext* context, size_t bytes, Answer answer);

// Between gRPC's bytes and a Session whose answer is one message.
class UnaryAnswer {
 public:
  virtual ~UnaryAnswer() = default;

  // First, on the work pool.
  virtual absl::StatusOr<GenerateRequest> Read(const ByteBuffer& request) = 0;
  virtual void Add(const SessionEvent& event) = 0;
  virtual ByteBuffer Bytes() const = 0;  // of all that was added
  // An error's fields as the client knows them.
  virtual absl::Status Named(const absl::Status& status) const { return status; }
};
UnaryReactor* StartUnary(CallEnvironment& environment, RpcContext* context,
                         const ByteBuffer* request, ByteBuffer* response,
                         std::unique_ptr<UnaryAnswer> answer);

// Generate and GenerateStream: a Session each. Requests come as bytes, so that a malformed one gets
// a proper answer (wire_format.h).
UnaryReactor* StartGenerate(CallEnvironment& environment, RpcContext* context,
                            const ByteBuffer* request, ByteBuffer* response);
StreamReactor* StartGenerateStream(CallEnvironment& environment, RpcContext* context,
                                   const ByteBuffer* request);

// Resume: GenerateStream's answer, from a token on.
StreamReactor* StartResume(CallEnvironment& environment, RpcContext* context,
                           const ByteBuffer* request);

// Embed: likewise.
UnaryReactor* StartEmbed(CallEnvironment& environment, RpcContext* context,
                         const ByteBuffer* request, ByteBuffer* response);

// Puts the next message of a stream into `bytes`; false if there is none yet. Must not block.
using NextMessage = std::function<bool(ByteBuffer& bytes)>;
// A stream without an end, at the client's pace: `next` is asked whenever the ledger has a new
// record. `caller`: why it may not have it. Destroys `next` when the call is over.
StreamReactor* StartFollow(CallEnvironment& environment, const absl::Status& caller,
                           NextMessage next);

// WatchLedger: reads the ledger's ring at the client's pace and reports what the client missed.
StreamReactor* StartWatchLedger(CallEnvironment& environment, const RpcContext& context,
                                const ByteBuffer& request);

}  // namespace treadle
