// Requests of the gRPC API, from the wire to what the scheduler would be given: the first byte says
// which RPC, the rest is its message.
#include <grpcpp/grpcpp.h>

#include "base/status.h"
#include "base/utf8.h"
#include "server/gateway/gateway_messages.h"
#include "server/gateway/vllm_engine.pb.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/wire_format.h"
#include "server/session/request_validation.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/fuzzed_model.h"
#include "tests/fuzz/models/use_tokenizer.h"

namespace treadle {
namespace {

constexpr RequestLimits kLimits = {.max_batch_size = 4, .pooling = Pooling::kMean};

// Properties that the planner and the ranks rely on.
void CheckSpec(const RequestSpec& spec) {
  const ServedModel& model = FuzzedModel();
  const auto prompt = static_cast<int64_t>(spec.prompt.size());
  TREADLE_CHECK(prompt >= 1 && spec.max_new_tokens >= 1);
  TREADLE_CHECK(prompt + spec.max_new_tokens <= model.max_context);
  TREADLE_CHECK(spec.min_new_tokens >= 0 && spec.min_new_tokens <= spec.max_new_tokens);
  TREADLE_CHECK(spec.candidates >= 1 && spec.candidates <= kLimits.max_batch_size);
  for (const auto* ids : {&spec.prompt, &spec.end_tokens}) {
    TREADLE_CHECK(ValidateTokenIds("", *ids, model.vocab).ok());
  }
  for (const LogitBias& bias : spec.sampling.logit_bias) {
    TREADLE_CHECK(bias.token >= 0 && bias.token < model.vocab);
  }
}

void CheckError(const absl::Status& status) {
  const std::string message = ToGrpcStatus(status).error_message();
  TREADLE_CHECK(!message.empty() && FindInvalidUtf8(message) == std::string::npos);
}

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  const size_t rpc = input.Choose(6);
  const auto parse = [&](google::protobuf::Message& message) {
    const CheckEntries check = [&](std::string_view field, int64_t entries) {
      return rpc >= 4 ? ValidateGatewayEntries(field, entries, rpc == 5, FuzzedModel())
                      : ValidateEntries(field, entries, rpc == 3, FuzzedModel());
    };
    const bool bounded = rpc != 1 && rpc != 2;
    const absl::Status parsed =
        ParseMessage(input.Rest(), message, bounded ? check : CheckEntries());
    if (!parsed.ok()) CheckError(parsed);
    return parsed.ok();
  };
  if (rpc == 0) {
    v1::GenerateRequest message;
    if (!parse(message)) return;
    const auto valid =
        ValidateRequest(ToRequest(message, FuzzedModel()), FuzzedModel(), kLimits, 1);
    return valid.ok() ? CheckSpec(valid->spec) : CheckError(valid.status());
  }
  if (rpc == 1) {
    v1::TokenizeRequest message;
    if (parse(message)) UseTokenizer(*FuzzedModel().tokenizer, message.text());
    return;
  }
  if (rpc == 4) {
    vllm::grpc::engine::GenerateRequest message;
    if (!parse(message)) return;
    const auto request = ToRequest(message, FuzzedModel());
    if (!request.ok()) return CheckError(request.status());
    const auto valid = ValidateRequest(*request, FuzzedModel(), kLimits, 1);
    return valid.ok() ? CheckSpec(valid->spec) : CheckError(InGatewayNames(valid.status()));
  }
  if (rpc == 5) {
    vllm::grpc::engine::EmbedRequest message;
    if (!parse(message)) return;
    const auto request = ToRequest(message);
    if (!request.ok()) return CheckError(request.status());
    ValidateRequest(*request, FuzzedModel(), kLimits, 1).IgnoreError();
    return;
  }
  if (rpc == 3) {
    v1::EmbedRequest message;
    if (!parse(message)) return;
    const auto valid = ValidateRequest(ToRequest(message), FuzzedModel(), kLimits, 1);
    if (!valid.ok()) return CheckError(valid.status());
    TREADLE_CHECK(static_cast<int64_t>(valid->spec.prompt.size()) <= FuzzedModel().max_context);
    TREADLE_CHECK(ValidateTokenIds("", valid->spec.prompt, FuzzedModel().vocab).ok());
    return;
  }
  v1::DetokenizeRequest message;
  if (!parse(message)) return;
  const auto& ids = message.token_ids().ids();
  constexpr size_t kMax = 100, kMaxToken = 4;
  const std::string text =
      FuzzedModel().tokenizer->Decode({ids.data(), static_cast<size_t>(ids.size())}, true, kMax);
  TREADLE_CHECK(text.size() <= kMax + kMaxToken);
}

std::vector<std::string> Seeds() {
  std::vector<v1::GenerateRequest> requests(3);
  requests[0].set_text("abba <s> \xc3\xa9");
  for (const int id : {1, 2, 257}) requests[1].mutable_token_ids()->add_ids(id);
  for (const char* role : {"system", "user", "assistant", "user"}) {
    v1::ChatMessage& message = *requests[2].mutable_chat()->add_messages();
    message.set_role(role);
    message.set_content("ab");
  }
  std::vector<std::string> seeds;
  for (v1::GenerateRequest& request : requests) {
    request.set_request_id("r");
    v1::Sampling& sampling = *request.mutable_sampling();
    sampling.set_temperature(0.5f);
    sampling.set_top_k(3);
    sampling.set_seed(7);
    sampling.set_num_candidates(2);
    sampling.add_logit_bias()->set_bias(-3);
    v1::Stopping& stopping = *request.mutable_stopping();
    stopping.set_max_new_tokens(4);
    stopping.set_min_new_tokens(1);
    stopping.add_stop_strings("stop");
    stopping.add_stop_token_ids(3);
    request.mutable_response()->set_logprobs(2);
    request.mutable_constraint()->set_regex("(ab|[^c-e]){2,4}");
    seeds.push_back('\0' + request.SerializeAsString());
  }
  v1::TokenizeRequest tokenize;
  tokenize.set_text("abba <s> \xc3\xa9");
  seeds.push_back('\1' + tokenize.SerializeAsString());
  v1::DetokenizeRequest detokenize;
  for (const int id : {1, 195, 258, 169, 1 << 20, -1}) detokenize.mutable_token_ids()->add_ids(id);
  seeds.push_back('\2' + detokenize.SerializeAsString());
  v1::EmbedRequest embed;
  embed.set_text("abba");
  seeds.push_back('\3' + embed.SerializeAsString());
  vllm::grpc::engine::GenerateRequest of_gateway;
  of_gateway.set_request_id("g");
  of_gateway.mutable_tokenized()->add_input_ids(3);
  of_gateway.mutable_sampling_params()->set_temperature(0.5f);
  of_gateway.mutable_sampling_params()->set_n(2);
  of_gateway.mutable_sampling_params()->add_stop("ab");
  of_gateway.mutable_sampling_params()->set_json_schema(R"({"type":"object"})");
  seeds.push_back('\4' + of_gateway.SerializeAsString());
  v1::GenerateRequest many;
  for (int i = 0; i < 900; ++i) many.mutable_chat()->add_messages();
  seeds.push_back('\0' + many.SerializeAsString());
  vllm::grpc::engine::EmbedRequest of_gateway_embed;
  of_gateway_embed.mutable_tokenized()->add_input_ids(3);
  seeds.push_back('\5' + of_gateway_embed.SerializeAsString());
  return seeds;
}

}  // namespace

const FuzzTarget kRequestsTarget = {"requests", 2048, Seeds, Run};

}  // namespace treadle
