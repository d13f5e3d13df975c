#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "base/status.h"
#include "server/grpc/calls.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/rpc_status.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

std::string_view Metadata(const grpc::CallbackServerContext& context, const char* key) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(key);
  if (found == metadata.end()) return {};
  return {found->second.data(), found->second.size()};
}

// The gRPC deadline is the request's deadline.
Caller CallerOf(const CallEnvironment& environment, const grpc::CallbackServerContext& context) {
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

absl::StatusOr<GenerateRequest> Read(const grpc::ByteBuffer& bytes) {
  v1::GenerateRequest message;
  TREADLE_RETURN_IF_ERROR(Parse(bytes, message));
  return ToRequest(message);
}

class UnaryCall final : public grpc::ServerUnaryReactor, public Session {
 public:
  UnaryCall(SessionEnvironment& environment, grpc::ByteBuffer* response)
      : Session(environment), response_(response) {}

  void OnCancel() override { Cancel(); }
  void OnDone() override { Release(); }

 private:
  bool Write(const SessionEvent& event) override {
    if (event.output) AppendOutput(*event.output, CandidateIn(event.output->candidate, message_));
    FillEnds(event, message_);
    if (event.end) {
      *response_ = Serialize(message_);
      Finish(grpc::Status::OK);
    }
    return true;
  }
  void Fail(const absl::Status& status) override { Finish(ToGrpcStatus(status)); }

  grpc::ByteBuffer* const response_;  // gRPC's; valid until Finish
  v1::GenerateResponse message_;
};

class StreamCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public Session {
 public:
  StreamCall(SessionEnvironment& environment, grpc::CallbackServerContext* context)
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

  grpc::CallbackServerContext* const context_;  // gRPC's; valid until OnDone
  grpc::ByteBuffer written_;                    // valid until the write is done
};

}  // namespace

std::string_view Authorization(const grpc::CallbackServerContext& context) {
  return Metadata(context, "authorization");
}

grpc::ServerUnaryReactor* StartGenerate(CallEnvironment& environment,
                                        grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) {
  auto call = std::make_shared<UnaryCall>(environment.sessions, response);
  call->Start(CallerOf(environment, *context), [&] { return Read(*request); });
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGenerateStream(
    CallEnvironment& environment, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request) {
  auto call = std::make_shared<StreamCall>(environment.sessions, context);
  call->Start(CallerOf(environment, *context), [&] { return Read(*request); });
  return call.get();
}

}  // namespace treadle
