#include "server/cli/generate_client.h"

#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "kernels/sampling.h"
#include "net/client_channel.h"
#include "server/grpc/inference.grpc.pb.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

// A flag that sets the field of that name.
void AddSamplingFlag(CLI::App& app, const SamplingField& field, v1::Sampling& sampling) {
  const auto* to = v1::Sampling::descriptor()->FindFieldByName(std::string(field.name));
  std::string flag = "--" + std::string(field.name);
  std::ranges::replace(flag, '_', '-');
  const std::string help(field.help);
  const google::protobuf::Reflection* set = sampling.GetReflection();
  if (std::holds_alternative<float SamplingParameters::*>(field.member)) {
    app.add_option_function<float>(
        flag, [=, &sampling](const float& value) { set->SetFloat(&sampling, to, value); }, help);
  } else {
    app.add_option_function<int32_t>(
        flag, [=, &sampling](const int32_t& value) { set->SetInt32(&sampling, to, value); }, help);
  }
}

}  // namespace

void AddSamplingFlags(CLI::App& app, v1::GenerateRequest& request) {
  v1::Sampling& sampling = *request.mutable_sampling();
  app.option_defaults()->group("Sampling");
  for (const SamplingField& field : kSamplingFields) AddSamplingFlag(app, field, sampling);
  app.get_option("--temperature")
      ->description("0: greedy, the default unless the model's authors recommend otherwise");
  app.add_option_function<uint64_t>("--seed", SetsField(sampling, &v1::Sampling::set_seed),
                                    "seed of sampling; random if absent");
}

void AddStoppingFlags(CLI::App& app, v1::GenerateRequest& request) {
  using v1::Stopping;
  Stopping& stopping = *request.mutable_stopping();
  app.option_defaults()->group("End of the answer");
  app.add_option_function<int32_t>("--max-new-tokens",
                                   SetsField(stopping, &Stopping::set_max_new_tokens),
                                   "most new tokens; the server's default if absent");
  app.add_option_function<int32_t>("--min-new-tokens",
                                   SetsField(stopping, &Stopping::set_min_new_tokens),
                                   "fewest new tokens: no end before");
  app.add_option_function<std::vector<std::string>>(
         "--stop",
         [&stopping](const std::vector<std::string>& texts) {
           stopping.mutable_stop_strings()->Add(texts.begin(), texts.end());
         },
         "stop string; may be given several times")
      ->expected(1)
      ->take_all();
  app.add_option_function<std::vector<int32_t>>(
         "--stop-token-ids",
         [&stopping](const std::vector<int32_t>& ids) {
           stopping.mutable_stop_token_ids()->Add(ids.begin(), ids.end());
         },
         "ids that end the answer: 1,2,3")
      ->delimiter(',');
  app.add_flag_callback(
      "--ignore-eos", [&stopping] { stopping.set_ignore_eos(true); },
      "go on after the model's end token");
}

void DefaultToGreedy(bool recommended, v1::GenerateRequest& request) {
  v1::Sampling& sampling = *request.mutable_sampling();
  if (!recommended && !sampling.has_temperature()) sampling.set_temperature(0);
}

struct GenerateClient::Server {
  std::string target;
  ClientAccess access;
  std::chrono::milliseconds timeout{0};
  std::unique_ptr<v1::Inference::Stub> stub;

  void Prepare(grpc::ClientContext& context) const {
    if (!access.authorization.empty()) context.AddMetadata("authorization", access.authorization);
    if (timeout.count() > 0) context.set_deadline(std::chrono::system_clock::now() + timeout);
  }
  absl::Status Named(const absl::Status& status) const {
    if (status.ok()) return status;
    return absl::Status(status.code(), Str(target, ": ", status.ToString()));
  }
  absl::Status Read(grpc::ClientReader<v1::GenerateResponse>& reader,
                    const OnResponse& on_response) const {
    for (v1::GenerateResponse response; reader.Read(&response);) on_response(response);
    return Named(FromGrpcStatus(reader.Finish()));
  }
};

absl::StatusOr<GenerateClient> GenerateClient::Open(const std::string& target,
                                                    const ClientFlags& flags,
                                                    std::chrono::milliseconds timeout) {
  TREADLE_ASSIGN_OR_RETURN(ClientAccess access, OpenAccess(flags));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  auto stub = v1::Inference::NewStub(OpenChannel(target, access.credentials, arguments));
  return GenerateClient(
      std::make_shared<Server>(Server{target, std::move(access), timeout, std::move(stub)}));
}

absl::StatusOr<v1::GetModelInfoResponse> GenerateClient::ModelInfo() const {
  grpc::ClientContext context;
  server_->Prepare(context);
  v1::GetModelInfoResponse model;
  TREADLE_RETURN_IF_ERROR(
      server_->Named(FromGrpcStatus(server_->stub->GetModelInfo(&context, {}, &model))));
  return model;
}

absl::Status GenerateClient::Generate(const v1::GenerateRequest& request,
                                      grpc::ClientContext& context,
                                      const OnResponse& on_response) const {
  server_->Prepare(context);
  return server_->Read(*server_->stub->GenerateStream(&context, request), on_response);
}

absl::Status GenerateClient::Resume(const v1::ResumeRequest& request,
                                    const OnResponse& on_response) const {
  grpc::ClientContext context;
  server_->Prepare(context);
  return server_->Read(*server_->stub->Resume(&context, request), on_response);
}

}  // namespace treadle
