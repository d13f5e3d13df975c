#include "server/cli/generate_source.h"

#include <grpcpp/grpcpp.h>

#include <future>
#include <utility>

#include "base/status.h"
#include "server/cli/open_model.h"
#include "server/cli/progress.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/rpc_status.h"
#include "server/serving_stack.h"
#include "server/session/session.h"

namespace treadle {
namespace {

// The front end of one caller in this process.
class LocalCall final : public Session {
 public:
  LocalCall(SessionEnvironment& environment, const OnResponse& on_response)
      : Session(environment), on_response_(on_response) {}

  absl::Status Wait() { return ended_.get_future().get(); }

 private:
  bool Write(const SessionEvent& event) override {
    on_response_(ToResponse(event));
    if (event.end) ended_.set_value(absl::OkStatus());
    return true;
  }
  void Fail(const absl::Status& status) override { ended_.set_value(status); }

  const OnResponse& on_response_;
  std::promise<absl::Status> ended_;
};

}  // namespace

absl::Status GenerateFromServer(const std::string& target, const ClientAccess& access,
                                std::chrono::milliseconds timeout,
                                const v1::GenerateRequest& request, const OnResponse& on_response) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  const auto channel = grpc::CreateCustomChannel(target, access.credentials, arguments);
  const auto stub = v1::Inference::NewStub(channel);
  grpc::ClientContext context;
  if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
  if (timeout.count() > 0) context.set_deadline(std::chrono::system_clock::now() + timeout);
  const auto reader = stub->GenerateStream(&context, request);
  for (v1::GenerateResponse response; reader->Read(&response);) on_response(response);
  const absl::Status status = FromGrpcStatus(reader->Finish());
  if (status.ok()) return status;
  return absl::Status(status.code(), Str(target, ": ", absl::StatusCodeToString(status.code()),
                                         ": ", std::string(status.message())));
}

absl::Status GenerateInProcess(const ServeOptions& options, std::chrono::milliseconds timeout,
                               const v1::GenerateRequest& request, const OnResponse& on_response) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(options));
  absl::StatusOr<OpenedModel> opened = absl::UnknownError("");
  {
    Progress progress("loading " + options.model);
    opened = OpenModel(options, [&](double fraction) { progress.Set(fraction); });
  }
  TREADLE_RETURN_IF_ERROR(opened.status());
  TREADLE_ASSIGN_OR_RETURN(
      const std::unique_ptr<ServingStack> stack,
      ServingStack::Create(std::move(opened->served), std::move(opened->engine),
                           SchedulingFrom(options, *opened)));
  TREADLE_RETURN_IF_ERROR(stack->Start());
  SessionEnvironment environment{
      .model = stack->model(),
      .pool = stack->pool(),
      .limits = {.max_batch_size = options.max_batch_size,
                 .default_max_new_tokens = static_cast<int32_t>(options.default_max_new_tokens)},
      .request_log = RequestLog({}, stack->model().name)};
  Caller caller;
  if (timeout.count() > 0) caller.deadline = caller.arrival + timeout;
  const auto call = std::make_shared<LocalCall>(environment, on_response);
  call->Start(caller, [&] { return ToRequest(request); });
  const absl::Status status = call->Wait();
  call->Release();
  return status;
}

}  // namespace treadle
