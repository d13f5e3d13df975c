// A session whose whole answer is one message of gRPC's.
#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <utility>

#include "server/grpc/calls.h"
#include "server/grpc/wire_format.h"

namespace treadle {

// `Response` is filled by its Add(const SessionEvent&, Response&).
template <typename Response>
class UnaryCall final : public grpc::ServerUnaryReactor, public Session {
 public:
  using Rename =
      absl::Status (*)(const absl::Status&);  // an error's fields, as the client knows them

  UnaryCall(SessionEnvironment& environment, grpc::ByteBuffer* response, Rename rename)
      : Session(environment), response_(response), rename_(rename) {}

  void OnCancel() override { Cancel(); }
  void OnDone() override { Release(); }

 private:
  bool Write(const SessionEvent& event) override {
    Add(event, message_);
    if (event.end) {
      *response_ = Serialize(message_);
      Finish(grpc::Status::OK);
    }
    return true;
  }
  void Fail(const absl::Status& status) override {
    Finish(ToGrpcStatus(rename_ == nullptr ? status : rename_(status)));
  }

  grpc::ByteBuffer* const response_;  // gRPC's; valid until Finish
  const Rename rename_;               // null: they have our names
  Response message_;
};

// `read` runs on the work pool, before anything else.
template <typename Response>
grpc::ServerUnaryReactor* StartUnary(
    CallEnvironment& environment, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request, grpc::ByteBuffer* response,
    absl::StatusOr<GenerateRequest> (*read)(const grpc::ByteBuffer&),
    typename UnaryCall<Response>::Rename rename = nullptr) {
  auto call = std::make_shared<UnaryCall<Response>>(environment.sessions, response, rename);
  call->Start(CallerOf(environment, *context), request->Length(),
              [request, read] { return read(*request); });
  return call.get();
}

}  // namespace treadle
