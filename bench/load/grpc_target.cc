#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <utility>

#include "base/status.h"
#include "bench/load/load_target.h"
#include "net/client_channel.h"
#include "server/gateway/vllm_engine.grpc.pb.h"
#include "server/grpc/inference.grpc.pb.h"

namespace treadle {
namespace {

using vllm::grpc::engine::VllmEngine;

// Treadle's own service.
struct Own {
  using Service = v1::Inference;
  using Request = v1::GenerateRequest;
  using Response = v1::GenerateResponse;

  static Request ToMessage(const LoadRequest& request, uint64_t /*number*/) {
    Request message;
    message.mutable_token_ids()->mutable_ids()->Add(request.token_ids.begin(),
                                                    request.token_ids.end());
    message.mutable_sampling()->set_temperature(request.temperature);
    message.mutable_stopping()->set_max_new_tokens(request.max_new_tokens);
    message.mutable_stopping()->set_ignore_eos(request.ignore_eos);
    return message;
  }
  static void Start(Service::Stub& stub, grpc::ClientContext* context, const Request* request,
                    grpc::ClientReadReactor<Response>* reactor) {
    stub.async()->GenerateStream(context, request, reactor);
  }
  static const auto& IdsOf(const Response& response) { return response.output().token_ids(); }

  static grpc::Status GetLimits(Service::Stub& stub, grpc::ClientContext* context,
                                LoadTarget::Limits& limits) {
    v1::GetModelInfoResponse info;
    const grpc::Status status = stub.GetModelInfo(context, {}, &info);
    limits = {info.max_context(), info.vocab_size(), info.name()};
    if (info.has_sampling_defaults()) {
      google::protobuf::util::JsonPrintOptions names;
      names.preserve_proto_field_names = true;
      (void)google::protobuf::util::MessageToJsonString(info.sampling_defaults(),
                                                        &limits.sampling_defaults, names);
    } else if (status.ok()) {
      limits.sampling_defaults = "{}";
    }
    return status;
  }
};

// The engine protocol of gateways. It does not tell what sampling defaults there are.
struct Gateway {
  using Service = VllmEngine;
  using Request = vllm::grpc::engine::GenerateRequest;
  using Response = vllm::grpc::engine::GenerateResponse;

  static Request ToMessage(const LoadRequest& request, uint64_t number) {
    Request message;
    message.set_request_id(Str("load-", number));
    message.mutable_tokenized()->mutable_input_ids()->Add(request.token_ids.begin(),
                                                          request.token_ids.end());
    message.mutable_sampling_params()->set_temperature(request.temperature);
    message.mutable_sampling_params()->set_max_tokens(
        static_cast<uint32_t>(request.max_new_tokens));
    message.mutable_sampling_params()->set_ignore_eos(request.ignore_eos);
    message.set_stream(true);
    return message;
  }
  static void Start(Service::Stub& stub, grpc::ClientContext* context, const Request* request,
                    grpc::ClientReadReactor<Response>* reactor) {
    stub.async()->Generate(context, request, reactor);
  }
  static const auto& IdsOf(const Response& response) { return response.chunk().token_ids(); }

  static grpc::Status GetLimits(Service::Stub& stub, grpc::ClientContext* context,
                                LoadTarget::Limits& limits) {
    vllm::grpc::engine::GetModelInfoResponse info;
    const grpc::Status status = stub.GetModelInfo(context, {}, &info);
    limits = {info.max_context_length(), static_cast<int32_t>(info.vocab_size()),
              info.served_model_name()};
    return status;
  }
};

void Authorize(const ClientAccess& access, grpc::ClientContext& context) {
  if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
}

// One streaming call; lives until OnDone.
template <typename Protocol>
class StreamingCall final : public grpc::ClientReadReactor<typename Protocol::Response> {
 public:
  StreamingCall(typename Protocol::Service::Stub& stub, const ClientAccess& access,
                const LoadRequest& request, uint64_t number, LoadAnswer& answer)
      : request_(Protocol::ToMessage(request, number)), answer_(answer) {
    context_.set_deadline(std::chrono::system_clock::now() + request.timeout);
    Authorize(access, context_);
    Protocol::Start(stub, &context_, &request_, this);
    this->StartRead(&reply_);
    answer.sent();
    this->StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const auto& ids = Protocol::IdsOf(reply_);
    ids_.assign(ids.begin(), ids.end());
    answer_.received(static_cast<int32_t>(ids_.size()), ids_);
    this->StartRead(&reply_);
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
  typename Protocol::Request request_;
  typename Protocol::Response reply_;
  std::vector<int32_t> ids_;
  LoadAnswer& answer_;
};

template <typename Protocol>
class GrpcTarget final : public LoadTarget {
 public:
  explicit GrpcTarget(const LoadServer& server) : server_(server) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    stub_ = Protocol::Service::NewStub(
        OpenChannel(server.target, server.access.credentials, arguments));
  }

  absl::StatusOr<Limits> GetLimits(std::chrono::seconds patience) override {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    context.set_deadline(std::chrono::system_clock::now() + patience);
    Authorize(server_.access, context);
    Limits limits;
    const grpc::Status status = Protocol::GetLimits(*stub_, &context, limits);
    if (status.ok()) return limits;
    return absl::UnavailableError(Str(server_.target,
                                      ": no server of this protocol answers there (",
                                      status.error_message(), ")"));
  }

  void Send(LoadRequest request, LoadAnswer& answer) override {
    new StreamingCall<Protocol>(*stub_, server_.access, request, sent_++, answer);
  }

 private:
  const LoadServer server_;
  std::unique_ptr<typename Protocol::Service::Stub> stub_;
  std::atomic<uint64_t> sent_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadTarget>> ConnectToServer(const LoadServer& server) {
  switch (server.protocol) {
    case LoadProtocol::kOpenAi:
      return ConnectToOpenAi(server);
    case LoadProtocol::kVllmGrpc:
      return std::make_unique<GrpcTarget<Gateway>>(server);
    default:
      return std::make_unique<GrpcTarget<Own>>(server);
  }
}

}  // namespace treadle
