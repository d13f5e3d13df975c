#include "server/grpc/calls.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <type_traits>
#include <utility>

#include "base/status.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/ledger_reader.h"
#include "server/grpc/messages.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

std::string_view Metadata(const RpcContext& context, const char* key) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(key);
  if (found == metadata.end()) return {};
  return {found->second.data(), found->second.size()};
}

constexpr char kKind[] = "grpc";  // of stored requests

template <typename Message>
absl::StatusOr<GenerateRequest> Read(const ByteBuffer& bytes, const SessionEnvironment& sessions) {
  constexpr bool kEmbedding = std::is_same_v<Message, v1::EmbedRequest>;
  Message message;
  TREADLE_RETURN_IF_ERROR(
      Parse(bytes, message, [&sessions](std::string_view field, int64_t entries) {
        return ValidateEntries(field, entries, kEmbedding, sessions.model);
      }));
  if constexpr (kEmbedding) {
    return ToRequest(message);
  } else {
    GenerateRequest request = ToRequest(message, sessions.model);
    if (sessions.store == nullptr) return request;
    request.kind = kKind;
    request.body = message.SerializeAsString();
    return request;
  }
}

absl::StatusOr<GenerateRequest> ReadStored(const StoredRequest& stored, const ServedModel& model) {
  if (stored.kind != kKind) {
    return absl::FailedPreconditionError(
        "the request was asked over HTTP, expected to be resumed there");
  }
  v1::GenerateRequest message;
  TREADLE_RETURN_IF_ERROR(ParseMessage(stored.body, message));
  return ToRequest(message, model);
}

absl::StatusOr<ResumePoint> ReadResume(const ByteBuffer& bytes, const ServedModel& model) {
  constexpr size_t kMaxBytes = 1024;  // it is read on gRPC's thread
  if (bytes.Length() > kMaxBytes) {
    return InvalidArgument("the request has ", bytes.Length(), " bytes, expected at most ",
                           kMaxBytes);
  }
  v1::ResumeRequest message;
  TREADLE_RETURN_IF_ERROR(Parse(bytes, message));
  return ResumePoint{
      .id = message.request_id(),
      .from_token = message.from_token(),
      .read = [&model](const StoredRequest& stored) { return ReadStored(stored, model); }};
}

template <typename Request, typename Response>
class OurAnswer final : public UnaryAnswer {
 public:
  explicit OurAnswer(const SessionEnvironment& sessions) : sessions_(sessions) {}
  absl::StatusOr<GenerateRequest> Read(const ByteBuffer& request) override {
    return treadle::Read<Request>(request, sessions_);
  }
  void Add(const SessionEvent& event) override { treadle::Add(event, message_); }
  ByteBuffer Bytes() const override { return Serialize(message_); }

 private:
  const SessionEnvironment& sessions_;
  Response message_;
};

class UnaryCall final : public UnaryReactor, public Session {
 public:
  UnaryCall(SessionEnvironment& environment, std::unique_ptr<UnaryAnswer> answer,
            ByteBuffer* response)
      : Session(environment), answer_(std::move(answer)), response_(response) {}

  absl::StatusOr<GenerateRequest> Read(const ByteBuffer& request) { return answer_->Read(request); }

  void OnCancel() override { Cancel(); }
  void OnDone() override { Release(); }

 private:
  bool Write(const SessionEvent& event) override {
    answer_->Add(event);
    if (event.end) {
      *response_ = answer_->Bytes();
      Finish(grpc::Status::OK);
    }
    return true;
  }
  void Fail(const absl::Status& status) override { Finish(ToGrpcStatus(answer_->Named(status))); }

  const std::unique_ptr<UnaryAnswer> answer_;
  ByteBuffer* const response_;  // gRPC's; valid until Finish
};

class StreamCall final : public StreamReactor, public Session {
 public:
  StreamCall(SessionEnvironment& environment, RpcContext* context)
      : Session(environment), context_(context) {}

  void OnWriteDone(bool ok) override { Written(ok); }
  void OnCancel() override { Cancel(); }
  void OnDone() override { Release(); }

 private:
  bool Write(const SessionEvent& event) override {
    written_ = Serialize(ToResponse(event));
    if (event.end) {
      StartWriteAndFinish(&written_, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      StartWrite(&written_);
    }
    return false;
  }
  void Fail(const absl::Status& status) override { Finish(ToGrpcStatus(status)); }
  void BreakWrite() override { context_->TryCancel(); }

  RpcContext* const context_;  // gRPC's; valid until OnDone
  ByteBuffer written_;         // valid until the write is done
};

// Writes messages at the client's pace, whenever the ledger's follower says that there may be some.
class FollowCall final : public StreamReactor, public std::enable_shared_from_this<FollowCall> {
 public:
  FollowCall(CallEnvironment& environment, NextMessage next)
      : environment_(environment), next_(std::move(next)) {}

  // `caller`: why it may not follow.
  void Begin(const absl::Status& caller) {
    environment_.sessions.calls.Add();
    {
      MutexLock lock(mutex_);
      self_ = shared_from_this();
      if (!caller.ok()) return End(caller);
    }
    environment_.follower.Subscribe([weak = weak_from_this()] {
      const auto call = weak.lock();
      if (call) call->OnRecords();
      return call != nullptr;
    });
    OnRecords();  // those that are there
  }

  void OnRecords() {
    MutexLock lock(mutex_);
    Advance();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    gone_ = gone_ || !ok;
    Advance();
  }
  void OnCancel() override {
    MutexLock lock(mutex_);
    gone_ = true;
    Advance();
  }
  void OnDone() override {
    environment_.sessions.calls.Remove();
    std::shared_ptr<FollowCall> last;  // released after the lock
    MutexLock lock(mutex_);
    last = std::move(self_);
  }

 private:
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    finished_ = true;
    Finish(ToGrpcStatus(status));
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || writing_) return;
    if (!gone_ && next_(written_)) {
      writing_ = true;
      StartWrite(&written_);
    } else if (gone_ || environment_.closing.load()) {
      End(absl::OkStatus());
    }
  }

  CallEnvironment& environment_;

  Mutex mutex_;
  std::shared_ptr<FollowCall> self_ ABSL_GUARDED_BY(mutex_);
  const NextMessage next_;  // called under the mutex
  ByteBuffer written_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::string_view Authorization(const RpcContext& context) {
  return Metadata(context, "authorization");
}

Caller CallerOf(const CallEnvironment& environment, const RpcContext& context) {
  Caller caller;
  caller.origin.client = environment.server->PeerOf(context.peer());
  caller.origin.header_id = PrintableId(Metadata(context, "x-request-id"));
  caller.authorization = Authorization(context);
  const auto wall = context.deadline();
  if (wall == std::chrono::system_clock::time_point::max()) return caller;
  const auto left = wall - std::chrono::system_clock::now();
  if (left < std::chrono::hours(24 * 365)) {
    caller.deadline = caller.arrival + std::chrono::duration_cast<Clock::duration>(left);
  }
  return caller;
}

UnaryReactor* Reply(CallEnvironment& environment, RpcContext* context, const Answer& answer) {
  UnaryReactor* reactor = context->DefaultReactor();
  const SessionEnvironment& sessions = environment.sessions;
  const absl::Status caller = sessions.Authorize(Authorization(*context)).status();
  reactor->Finish(ToGrpcStatus(caller.ok() ? sessions.refusals->Add(answer()) : caller));
  return reactor;
}

UnaryReactor* Work(CallEnvironment& environment, RpcContext* context, size_t bytes, Answer answer) {
  UnaryReactor* reactor = context->DefaultReactor();
  CallCount& calls = environment.sessions.calls;
  calls.Add();
  const absl::Status status = environment.sessions.Submit(
      Authorization(*context), CallerOf(environment, *context).origin, bytes,
      [context, reactor, &calls, counts = environment.sessions.refusals,
       answer = std::move(answer)] {
        const absl::Status end =
            counts->Add(context->IsCancelled() ? absl::CancelledError() : answer());
        calls.Remove();  // the server may go once this has finished
        reactor->Finish(ToGrpcStatus(end));
      });
  if (status.ok()) return reactor;
  calls.Remove();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

UnaryReactor* StartUnary(CallEnvironment& environment, RpcContext* context,
                         const ByteBuffer* request, ByteBuffer* response,
                         std::unique_ptr<UnaryAnswer> answer) {
  auto call = std::make_shared<UnaryCall>(environment.sessions, std::move(answer), response);
  call->Start(CallerOf(environment, *context), request->Length(),
              [call = call.get(), request] { return call->Read(*request); });
  return call.get();
}

UnaryReactor* StartGenerate(CallEnvironment& environment, RpcContext* context,
                            const ByteBuffer* request, ByteBuffer* response) {
  return StartUnary(
      environment, context, request, response,
      std::make_unique<OurAnswer<v1::GenerateRequest, v1::GenerateResponse>>(environment.sessions));
}

UnaryReactor* StartEmbed(CallEnvironment& environment, RpcContext* context,
                         const ByteBuffer* request, ByteBuffer* response) {
  return StartUnary(
      environment, context, request, response,
      std::make_unique<OurAnswer<v1::EmbedRequest, v1::EmbedResponse>>(environment.sessions));
}

StreamReactor* StartGenerateStream(CallEnvironment& environment, RpcContext* context,
                                   const ByteBuffer* request) {
  auto call = std::make_shared<StreamCall>(environment.sessions, context);
  call->Start(CallerOf(environment, *context), request->Length(),
              [request, &sessions = environment.sessions] {
                return Read<v1::GenerateRequest>(*request, sessions);
              });
  return call.get();
}

StreamReactor* StartResume(CallEnvironment& environment, RpcContext* context,
                           const ByteBuffer* request) {
  auto call = std::make_shared<StreamCall>(environment.sessions, context);
  call->Resume(CallerOf(environment, *context), ReadResume(*request, environment.sessions.model));
  return call.get();
}

StreamReactor* StartFollow(CallEnvironment& environment, const absl::Status& caller,
                           NextMessage next) {
  auto call = std::make_shared<FollowCall>(environment, std::move(next));
  call->Begin(caller);
  return call.get();
}

StreamReactor* StartWatchLedger(CallEnvironment& environment, const RpcContext& context,
                                const ByteBuffer& request) {
  const absl::StatusOr<std::shared_ptr<ApiKey>> key =
      environment.sessions.Authorize(Authorization(context));
  absl::Status caller = key.status();
  v1::WatchLedgerRequest message;
  if (caller.ok()) caller = environment.sessions.refusals->Add(ParseShort(request, message));
  return StartFollow(
      environment, caller,
      [reader = LedgerReader(environment.stack.ledger(), message.from_start(),
                             caller.ok() && *key ? (*key)->terms() : ApiKey::Terms())](
          ByteBuffer& bytes) mutable {
        v1::LedgerRecord record;
        if (!reader.Next(record)) return false;
        bytes = Serialize(record);
        return true;
      });
}

}  // namespace treadle
