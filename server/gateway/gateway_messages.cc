#include "server/gateway/gateway_messages.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_replace.h"
#include "base/status.h"
#include "server/gateway/vllm_engine.pb.h"

namespace treadle {
namespace {

namespace engine = ::vllm::grpc::engine;

// A number that is too large for us stays too large, and is refused where ranges are checked.
int32_t Narrow(uint32_t value) {
  return static_cast<int32_t>(std::min(value, uint32_t{std::numeric_limits<int32_t>::max()}));
}

std::vector<int32_t> Narrow(const google::protobuf::RepeatedField<uint32_t>& values) {
  std::vector<int32_t> out;
  out.reserve(static_cast<size_t>(values.size()));
  for (const uint32_t value : values) out.push_back(Narrow(value));
  return out;
}

// The first field that asks for what we lack; empty: none.
std::string LackedField(const engine::GenerateRequest& message) {
  const engine::SamplingParams& asked = message.sampling_params();
  const std::pair<bool, const char*> fields[] = {
      {asked.has_structural_tag(), "sampling_params.structural_tag"},
      {asked.has_truncate_prompt_tokens(), "sampling_params.truncate_prompt_tokens"},
      {message.has_kv_transfer_params(), "kv_transfer_params"},
      {message.has_kv_transfer_params_json(), "kv_transfer_params_json"},
      {message.data_parallel_rank() != 0, "data_parallel_rank"},
      {message.has_mm_inputs(), "mm_inputs"},
      {message.extra_mm_inputs_size() > 0, "extra_mm_inputs"},
      {message.has_media_refs(), "media_refs"}};
  const auto* const found = std::ranges::find(fields, true, &std::pair<bool, const char*>::first);
  return found == std::end(fields) ? "" : found->second;
}

GenerateRequest::Sampling ToSampling(const engine::SamplingParams& asked,
                                     const SamplingParameters& defaults) {
  GenerateRequest::Sampling to{.parameters = defaults};
  SamplingParameters& parameters = to.parameters;
  if (asked.has_temperature()) parameters.temperature = asked.temperature();
  if (asked.top_p() != 0) parameters.top_p = asked.top_p();
  if (asked.top_k() != 0) parameters.top_k = Narrow(asked.top_k());
  if (asked.min_p() != 0) parameters.min_p = asked.min_p();
  parameters.frequency_penalty = asked.frequency_penalty();
  parameters.presence_penalty = asked.presence_penalty();
  if (asked.repetition_penalty() != 0) parameters.repetition_penalty = asked.repetition_penalty();
  for (const auto& [token, bias] : asked.logit_bias()) {
    parameters.logit_bias.push_back({token, bias});
  }
  // An order that does not change from call to call, for what an error names.
  std::ranges::sort(parameters.logit_bias, {}, &LogitBias::token);
  if (asked.has_seed()) to.seed = static_cast<uint64_t>(int64_t{asked.seed()});
  if (asked.n() != 0) to.num_candidates = Narrow(asked.n());
  return to;
}

GenerateRequest::Stopping ToStopping(const engine::SamplingParams& asked) {
  GenerateRequest::Stopping to{.min_new_tokens = Narrow(asked.min_tokens()),
                               .stop_strings = {asked.stop().begin(), asked.stop().end()},
                               .stop_token_ids = Narrow(asked.stop_token_ids()),
                               .ignore_eos = asked.ignore_eos()};
  if (asked.has_max_tokens()) to.max_new_tokens = Narrow(asked.max_tokens());
  return to;
}

std::optional<Constraint> ToConstraint(const engine::SamplingParams& asked) {
  using Kind = Constraint::Kind;
  switch (asked.constraint_case()) {
    case engine::SamplingParams::kJsonSchema:
      return Constraint{.kind = Kind::kJsonSchema,
                        .text = asked.json_schema(),
                        .field = "sampling_params.json_schema"};
    case engine::SamplingParams::kRegex:
      return Constraint{
          .kind = Kind::kRegex, .text = asked.regex(), .field = "sampling_params.regex"};
    case engine::SamplingParams::kGrammar:
      return Constraint{
          .kind = Kind::kGrammar, .text = asked.grammar(), .field = "sampling_params.grammar"};
    case engine::SamplingParams::kChoice: {
      const auto& choices = asked.choice().choices();
      return Constraint{.kind = Kind::kChoice,
                        .choices = {choices.begin(), choices.end()},
                        .field = "sampling_params.choice"};
    }
    case engine::SamplingParams::kJsonObject:
      if (!asked.json_object()) return std::nullopt;
      return Constraint{.kind = Kind::kJsonObject, .field = "sampling_params.json_object"};
    case engine::SamplingParams::kStructuralTag:  // refused
    case engine::SamplingParams::CONSTRAINT_NOT_SET:
      return std::nullopt;
  }
  return std::nullopt;
}

template <typename LogProbs>  // OutputLogProbs, InputLogProbs
void AddTop(const TokenDetail& detail, LogProbs& to) {
  engine::TopLogProbs& top = *to.add_top_logprobs();
  for (const TokenLogprob& entry : detail.top) {
    top.add_token_ids(static_cast<uint32_t>(entry.token));
    top.add_values(entry.logprob);
  }
}

// Tokens, and their log probabilities where they were asked, behind those that are there.
template <typename Message>  // GenerateStreamChunk, GenerateComplete
void AddTokens(const OutputPart& part, google::protobuf::RepeatedField<uint32_t>& ids,
               Message& message) {
  ids.Add(part.token_ids.begin(), part.token_ids.end());
  message.set_completion_tokens(static_cast<uint32_t>(ids.size()));
  for (size_t i = 0; i < part.details.size(); ++i) {
    engine::OutputLogProbs& to = *message.mutable_output_logprobs();
    to.add_token_ids(static_cast<uint32_t>(part.token_ids[i]));
    to.add_token_logprobs(part.details[i].logprob);
    if (!part.details[i].top.empty()) AddTop(part.details[i], to);
  }
}

}  // namespace

absl::StatusOr<GenerateRequest> ToRequest(const engine::GenerateRequest& message,
                                          const ServedModel& model) {
  if (const std::string field = LackedField(message); !field.empty()) {
    return InvalidArgument(field, " is set, which this server does not support");
  }
  const engine::SamplingParams& asked = message.sampling_params();
  GenerateRequest request{.request_id = message.request_id(),
                          .sampling = ToSampling(asked, model.sampling()),
                          .stopping = ToStopping(asked)};
  request.constraint = ToConstraint(asked);
  if (message.has_tokenized()) {
    request.prompt = Narrow(message.tokenized().input_ids());
  } else if (message.has_text()) {
    request.prompt = message.text();
  } else {
    return InvalidArgument("input is missing, expected tokenized or text");
  }
  if (asked.has_logprobs()) request.logprobs = asked.logprobs();
  if (asked.has_prompt_logprobs()) request.prompt_logprobs = asked.prompt_logprobs();
  return request;
}

absl::StatusOr<GenerateRequest> ToRequest(const engine::EmbedRequest& message) {
  if (!message.has_tokenized()) return InvalidArgument("tokenized is missing");
  return GenerateRequest{.request_id = message.request_id(),
                         .prompt = Narrow(message.tokenized().input_ids()),
                         .embedding = true};
}

absl::Status ValidateGatewayEntries(std::string_view field, int64_t entries, bool embedding,
                                    const ServedModel& model) {
  constexpr std::pair<std::string_view, std::string_view> kOurNames[] = {
      {"tokenized.input_ids", "token_ids.ids"},
      {"sampling_params.logit_bias", "sampling.logit_bias"},
      {"sampling_params.stop", "stopping.stop_strings"},
      {"sampling_params.stop_token_ids", "stopping.stop_token_ids"},
      {"sampling_params.choice.choices", "constraint.choices.choice"}};
  const auto* const found =
      std::ranges::find(kOurNames, field, &std::pair<std::string_view, std::string_view>::first);
  return ValidateEntries(found == std::end(kOurNames) ? field : found->second, entries, embedding,
                         model);
}

absl::Status InGatewayNames(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kInvalidArgument) return status;
  return absl::InvalidArgumentError(absl::StrReplaceAll(
      status.message(), {{"sampling.num_candidates", "sampling_params.n"},
                         {"sampling.", "sampling_params."},
                         {"stopping.max_new_tokens", "sampling_params.max_tokens"},
                         {"to max_new_tokens (", "to max_tokens ("},
                         {"stopping.min_new_tokens", "sampling_params.min_tokens"},
                         {"stopping.stop_strings", "sampling_params.stop"},
                         {"stopping.stop_token_ids", "sampling_params.stop_token_ids"},
                         {"response.", "sampling_params."},
                         {"constraint: has", "sampling_params.choice: has"},
                         {"token_ids.ids", "tokenized.input_ids"},
                         {"expected token_ids", "expected tokenized"}}));
}

void Add(const SessionEvent& event, engine::EmbedResponse& response) {
  if (event.output) {
    const std::vector<float>& embedding = event.output->embedding;
    response.mutable_embedding()->Add(embedding.begin(), embedding.end());
    response.set_embedding_dim(static_cast<uint32_t>(embedding.size()));
  }
  if (event.end) response.set_prompt_tokens(static_cast<uint32_t>(event.end->prompt_tokens));
}

GatewayAnswer::GatewayAnswer(const engine::GenerateRequest& request)
    : stream_(request.stream()),
      prompt_logprobs_(request.sampling_params().has_prompt_logprobs()),
      stop_token_ids_(Narrow(request.sampling_params().stop_token_ids())) {}

GatewayAnswer::~GatewayAnswer() = default;

GatewayAnswer::Messages GatewayAnswer::Add(const SessionEvent& event) {
  Messages out;
  if (event.prompt) Begin(*event.prompt);
  if (event.output) {
    const OutputPart& part = *event.output;
    if (!stream_) {
      Keep(part);
    } else if (!part.token_ids.empty()) {
      AddChunk(part, out);
    }
    if (part.finish != FinishReason::kNone) End(part, out);
  }
  if (event.end && !stream_) {
    for (Complete& candidate : candidates_) out.emplace_back().mutable_complete()->Swap(&candidate);
  }
  return out;
}

GatewayAnswer::Messages GatewayAnswer::Abort() {
  Messages out;
  for (Complete& candidate : candidates_) {
    if (!candidate.finish_reason().empty() && stream_) continue;
    if (candidate.finish_reason().empty()) candidate.set_finish_reason("abort");
    *out.emplace_back().mutable_complete() = candidate;
  }
  if (candidates_.empty()) out.emplace_back().mutable_complete()->set_finish_reason("abort");
  return out;
}

void GatewayAnswer::Begin(const SessionEvent::Prompt& prompt) {
  const RequestSpec& request = prompt.request;
  candidates_.resize(static_cast<size_t>(request.candidates));
  begun_.resize(candidates_.size());
  for (size_t i = 0; i < candidates_.size(); ++i) {
    candidates_[i].set_index(static_cast<uint32_t>(i));
    candidates_[i].set_prompt_tokens(static_cast<uint32_t>(request.prompt.size()));
    candidates_[i].set_cached_tokens(static_cast<uint32_t>(prompt.cached_tokens));
  }
  if (!prompt_logprobs_) return;
  input_ = std::make_unique<engine::InputLogProbs>();
  for (size_t i = 0; i < request.prompt.size() && i <= prompt.details.size(); ++i) {
    input_->add_token_ids(static_cast<uint32_t>(request.prompt[i]));
    engine::InputTokenLogProb& value = *input_->add_token_logprobs();
    if (i > 0) value.set_value(prompt.details[i - 1].logprob);
    if (request.prompt_logprobs > 0) AddTop(i > 0 ? prompt.details[i - 1] : TokenDetail{}, *input_);
  }
  if (stream_) return;
  for (Complete& candidate : candidates_) *candidate.mutable_input_logprobs() = *input_;
}

void GatewayAnswer::AddChunk(const OutputPart& part, Messages& out) {
  Complete& candidate = candidates_[part.candidate];
  engine::GenerateStreamChunk& chunk = *out.emplace_back().mutable_chunk();
  chunk.set_index(part.candidate);
  chunk.set_prompt_tokens(candidate.prompt_tokens());
  chunk.set_cached_tokens(candidate.cached_tokens());
  AddTokens(part, *chunk.mutable_token_ids(), chunk);
  candidate.set_completion_tokens(candidate.completion_tokens() + chunk.completion_tokens());
  const bool first = !begun_[part.candidate];
  begun_[part.candidate] = true;
  if (first && input_) *chunk.mutable_input_logprobs() = *input_;
}

void GatewayAnswer::Keep(const OutputPart& part) {
  Complete& candidate = candidates_[part.candidate];
  AddTokens(part, *candidate.mutable_output_ids(), candidate);
}

void GatewayAnswer::End(const OutputPart& part, Messages& out) {
  Complete& candidate = candidates_[part.candidate];
  candidate.set_finish_reason(part.finish == FinishReason::kLength ? "length" : "stop");
  if (part.finish == FinishReason::kStopString) candidate.set_matched_stop_str(part.stop_string);
  if (part.finish == FinishReason::kEndToken &&
      std::ranges::find(stop_token_ids_, part.stop_token) != stop_token_ids_.end()) {
    candidate.set_matched_token_id(static_cast<uint32_t>(part.stop_token));
  }
  if (stream_) *out.emplace_back().mutable_complete() = candidate;
}

}  // namespace treadle
