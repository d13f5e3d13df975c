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
std::string_view Authorization(const grpc::CallbackServerContext& context);
// The caller, by the call's metadata. The gRPC deadline is the request's deadline.
Caller CallerOf(const CallEnvironment& environment, const grpc::CallbackServerContext& context);

using Answer = std::function<absl::Status()>;  // fills a response
// A call of one short answer, if the caller may call.
grpc::ServerUnaryReactor* Reply(CallEnvironment& environment, grpc::CallbackServerContext* context,
                                const Answer& answer);
// The same for what is said in a message: it is parsed like those of long calls, once the caller
// may call.
template <typename Request, typename Response>
grpc::ServerUnaryReactor* ReplyTo(
    CallEnvironment& environment, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
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
grpc::ServerUnaryReactor* Work(CallEnvironment& environment, grpc::CallbackServerContext* context,
                               size_t bytes, Answer answer);

// Between gRPC's bytes and a Session whose answer is one message.
class UnaryAnswer {
 public:
  virtual ~UnaryAnswer() = default;

  // First, on the work pool.
  virtual absl::StatusOr<GenerateRequest> Read(const grpc::ByteBuffer& request) = 0;
  virtual void Add(const SessionEvent& event) = 0;
  virtual grpc::ByteBuffer Bytes() const = 0;  // of all that was added
  // An error's fields as the client knows them.
  virtual absl::Status Named(const absl::Status& status) const { return status; }
};
grpc::ServerUnaryReactor* StartUnary(CallEnvironment& environment,
                                     grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
                                     std::unique_ptr<UnaryAnswer> answer);

// Generate and GenerateStream: a Session each. Requests come as bytes, so that a malformed one gets
// a proper answer (wire_format.h).
grpc::ServerUnaryReactor* StartGenerate(CallEnvironment& environment,
                                        grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response);
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGenerateStream(
    CallEnvironment& environment, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request);

// Resume: GenerateStream's answer, from a token on.
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartResume(CallEnvironment& environment,
                                                        grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request);

// Embed: likewise.
grpc::ServerUnaryReactor* StartEmbed(CallEnvironment& environment,
                                     grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request, grpc::ByteBuffer* response);

// Puts the next message of a stream into `bytes`; false if there is none yet. Must not block.
using NextMessage = std::function<bool(grpc::ByteBuffer& bytes)>;
// A stream without an end, at the client's pace: `next` is asked whenever the ledger has a new
// record. `caller`: why it may not have it. Destroys `next` when the call is over.
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartFollow(CallEnvironment& environment,
                                                        const absl::Status& caller,
                                                        NextMessage next);

// WatchLedger: reads the ledger's ring at the client's pace and reports what the client missed.
grpc::ServerWriteReactor<grpc::ByteBuffer>* StartWatchLedger(
    CallEnvironment& environment, const grpc::CallbackServerContext& context,
    const grpc::ByteBuffer& request);

}  // namespace treadle
