#include <grpcpp/grpcpp.h>

#include <utility>

#include "base/status.h"
#include "bench/load/load_replay.h"
#include "net/client_channel.h"
#include "server/cli/client_flags.h"
#include "server/grpc/inference.grpc.pb.h"

namespace treadle {
namespace {

void Authorize(const ClientAccess& access, grpc::ClientContext& context) {
  if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
}

treadle::v1::GenerateRequest ToMessage(const LoadRequest& request) {
  treadle::v1::GenerateRequest message;
  message.mutable_token_ids()->mutable_ids()->Add(request.token_ids.begin(),
                                                  request.token_ids.end());
  message.mutable_sampling()->set_temperature(request.temperature);
  message.mutable_stopping()->set_max_new_tokens(request.max_new_tokens);
  message.mutable_stopping()->set_ignore_eos(request.ignore_eos);
  return message;
}

// One streaming call; lives until OnDone.
class StreamingCall final : public grpc::ClientReadReactor<treadle::v1::GenerateResponse> {
 public:
  StreamingCall(treadle::v1::Inference::Stub& stub, const ClientAccess& access,
                const LoadRequest& request, LoadAnswer& answer)
      : request_(ToMessage(request)), answer_(answer) {
    context_.set_deadline(std::chrono::system_clock::now() + request.timeout);
    Authorize(access, context_);
    stub.async()->GenerateStream(&context_, &request_, this);
    StartRead(&reply_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    answer_.received(reply_.output().token_ids_size());
    StartRead(&reply_);
  }

  void OnDone(const grpc::Status& status) override {
    std::string error;
    if (!status.ok()) {
      error = Str("code ", static_cast<int>(status.error_code()), ": ", status.error_message());
    }
    LoadAnswer& answer = answer_;
    delete this;
    answer.ended(std::move(error));
  }

 private:
  grpc::ClientContext context_;
  treadle::v1::GenerateRequest request_;
  treadle::v1::GenerateResponse reply_;
  LoadAnswer& answer_;
};

class Server final : public LoadTarget {
 public:
  Server(const std::string& target, const ClientAccess& access) : target_(target), access_(access) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = treadle::v1::Inference::NewStub(OpenChannel(target, access.credentials, arguments));
  }

  absl::StatusOr<Limits> GetLimits() override { return GetLimits(std::chrono::seconds(10)); }
  absl::StatusOr<Limits> GetLimits(std::chrono::seconds timeout) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + timeout);
    Authorize(access_, context);
    treadle::v1::GetModelInfoResponse info;
    const grpc::Status status = stub_->GetModelInfo(&context, {}, &info);
    if (!status.ok()) {
      return absl::UnavailableError(
          Str(target_, ": no Treadle server answers there (", status.error_message(), ")"));
    }
    return Limits{info.max_context(), static_cast<int32_t>(info.vocab_size())};
  }

  void Send(LoadRequest request, LoadAnswer& answer) override {
    new StreamingCall(*stub_, access_, request, answer);
  }

 private:
  const std::string target_;
  const ClientAccess access_;
  std::unique_ptr<treadle::v1::Inference::Stub> stub_;
};

}  // namespace

std::unique_ptr<LoadTarget> ConnectToServer(const std::string& target, const ClientAccess& access) {
  return std::make_unique<Server>(target, access);
}

absl::Status WaitReady(const std::string& target, const ClientAccess& access,
                       std::chrono::seconds timeout) {
  return Server(target, access).GetLimits(timeout).status();
}

}  // namespace treadle
