// Requests of the gRPC API, from the wire to what the scheduler would be given: the first byte says
// which RPC, the rest is its message.
#include "base/status.h"
#include "base/utf8.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/wire_format.h"
#include "server/session/request_validation.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/use_tokenizer.h"

namespace treadle {
namespace {

constexpr RequestLimits kLimits = {.max_batch_size = 4, .pooling = Pooling::kMean};

const ServedModel& Model() {
  static const ServedModel model = [] {
    TokenizerSpec spec;
    spec.model = TokenizerSpec::Model::kSentencePiece;
    const char digits[] = "0123456789ABCDEF";
    for (int byte = 0; byte < 256; ++byte) {
      spec.tokens.push_back(
          {std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">", 0, TokenKind::kByte});
    }
    spec.tokens.push_back({"<s>", 0, TokenKind::kControl});
    spec.tokens.push_back({"</s>", 0, TokenKind::kControl});
    // One more than the model has rows.
    for (const char* text : {"a", "b", "ab", " "}) spec.tokens.push_back({text});
    spec.bos = 256;
    spec.eos = 257;
    spec.end_ids = {257};
    spec.add_bos = true;
    ServedModel made;
    made.vocab = static_cast<int32_t>(spec.tokens.size()) - 1;
    made.max_context = 64;
    made.kv_pages = 7;
    made.paging.page_size = 8;
    made.end_ids = spec.end_ids;
    made.tokenizer = *Tokenizer::Create(std::move(spec));
    made.chat_template = *ChatTemplate::Parse(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('late') }}{% endif %}<{{ m.role }}>{{ m['content'] | trim }}\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}");
    return made;
  }();
  return model;
}

// What the planner and the ranks rely on.
void CheckSpec(const RequestSpec& spec) {
  const ServedModel& model = Model();
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
  const size_t rpc = input.Choose(4);
  const auto parse = [&](google::protobuf::Message& message) {
    const absl::Status parsed = ParseMessage(input.Rest(), message);
    if (!parsed.ok()) CheckError(parsed);
    return parsed.ok();
  };
  if (rpc == 0) {
    v1::GenerateRequest message;
    if (!parse(message)) return;
    const auto valid = ValidateRequest(ToRequest(message), Model(), kLimits, 1);
    return valid.ok() ? CheckSpec(valid->spec) : CheckError(valid.status());
  }
  if (rpc == 1) {
    v1::TokenizeRequest message;
    if (parse(message)) UseTokenizer(*Model().tokenizer, message.text());
    return;
  }
  if (rpc == 3) {
    v1::EmbedRequest message;
    if (!parse(message)) return;
    const auto valid = ValidateRequest(ToRequest(message), Model(), kLimits, 1);
    if (!valid.ok()) return CheckError(valid.status());
    TREADLE_CHECK(static_cast<int64_t>(valid->spec.prompt.size()) <= Model().max_context);
    TREADLE_CHECK(ValidateTokenIds("", valid->spec.prompt, Model().vocab).ok());
    return;
  }
  v1::DetokenizeRequest message;
  if (!parse(message)) return;
  const auto& ids = message.token_ids().ids();
  constexpr size_t kMost = 100, kLongestToken = 4;
  const std::string text =
      Model().tokenizer->Decode({ids.data(), static_cast<size_t>(ids.size())}, true, kMost);
  TREADLE_CHECK(text.size() <= kMost + kLongestToken);
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
  return seeds;
}

}  // namespace

const FuzzTarget kRequestsTarget = {"requests", 2048, Seeds, Run};

}  // namespace treadle
