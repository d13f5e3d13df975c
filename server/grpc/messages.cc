#include "server/grpc/messages.h"

#include <optional>
#include <string>
#include <variant>

#include "server/grpc/inference.pb.h"
#include "server/session/sampling_defaults.h"

namespace treadle {
namespace {

SamplingParameters ToParameters(const v1::Sampling& message, SamplingParameters to) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (const SamplingField& field : kSamplingFields) {
    const auto* from = v1::Sampling::descriptor()->FindFieldByName(std::string(field.name));
    if (!reflection.HasField(message, from)) continue;
    if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
      to.*(*real) = reflection.GetFloat(message, from);
    } else {
      to.*std::get<int32_t SamplingParameters::*>(field.member) =
          reflection.GetInt32(message, from);
    }
  }
  for (const v1::LogitBias& entry : message.logit_bias()) {
    to.logit_bias.push_back({entry.token_id(), entry.bias()});
  }
  return to;
}

GenerateRequest::Sampling ToSampling(const v1::Sampling& message,
                                     const SamplingParameters& defaults) {
  GenerateRequest::Sampling to{.parameters = ToParameters(message, defaults)};
  if (message.has_seed()) to.seed = message.seed();
  if (message.has_num_candidates()) to.num_candidates = message.num_candidates();
  return to;
}

GenerateRequest::Stopping ToStopping(const v1::Stopping& message) {
  GenerateRequest::Stopping to{
      .min_new_tokens = message.min_new_tokens(),
      .stop_strings = {message.stop_strings().begin(), message.stop_strings().end()},
      .stop_token_ids = {message.stop_token_ids().begin(), message.stop_token_ids().end()},
      .ignore_eos = message.ignore_eos()};
  if (message.has_max_new_tokens()) to.max_new_tokens = message.max_new_tokens();
  return to;
}

std::optional<Constraint> ToConstraint(const v1::Constraint& message) {
  using Kind = Constraint::Kind;
  switch (message.kind_case()) {
    case v1::Constraint::kJsonSchema:
      return Constraint{.kind = Kind::kJsonSchema, .text = message.json_schema()};
    case v1::Constraint::kJsonObject:
      if (!message.json_object()) return std::nullopt;
      return Constraint{.kind = Kind::kJsonObject};
    case v1::Constraint::kRegex:
      return Constraint{.kind = Kind::kRegex, .text = message.regex()};
    case v1::Constraint::kChoices: {
      const auto& choices = message.choices().choice();
      return Constraint{.kind = Kind::kChoice, .choices = {choices.begin(), choices.end()}};
    }
    case v1::Constraint::kGrammar:
      return Constraint{.kind = Kind::kGrammar, .text = message.grammar()};
    case v1::Constraint::KIND_NOT_SET:
      return std::nullopt;
  }
  return std::nullopt;
}

void FillLogprob(int32_t token, const TokenDetail& detail, v1::TokenLogprob& out) {
  out.set_token_id(token);
  out.set_logprob(detail.logprob);
  for (const TokenLogprob& top : detail.top) {
    v1::TopLogprob* entry = out.add_top();
    entry->set_token_id(top.token);
    entry->set_logprob(top.logprob);
  }
}

// Text or ids.
template <typename Message>
decltype(GenerateRequest::prompt) PromptOf(const Message& message) {
  if (message.has_text()) return message.text();
  if (!message.has_token_ids()) return {};
  const auto& ids = message.token_ids().ids();
  return std::vector<int32_t>(ids.begin(), ids.end());
}

void FillTiming(const RequestTimings& timings, v1::Timing& out) {
  out.set_queued(timings.queued);
  out.set_first_token(timings.first_token);
  out.set_total(timings.total);
}

}  // namespace

GenerateRequest ToRequest(const v1::EmbedRequest& message) {
  return {.request_id = message.request_id(),
          .prompt = PromptOf(message),
          .embedding = true,
          .adapter = message.adapter()};
}

GenerateRequest ToRequest(const v1::GenerateRequest& message, const ServedModel& model) {
  GenerateRequest request{.request_id = message.request_id(),
                          .prompt = PromptOf(message),
                          .sampling = ToSampling(message.sampling(), model.sampling()),
                          .stopping = ToStopping(message.stopping())};
  if (message.has_chat()) {
    auto& messages = request.prompt.emplace<std::vector<ChatMessage>>();
    for (const v1::ChatMessage& said : message.chat().messages()) {
      messages.push_back({said.role(), said.content()});
    }
  }
  request.constraint = ToConstraint(message.constraint());
  if (request.constraint) {
    request.constraint->any_whitespace = message.constraint().any_whitespace();
  }
  request.cache_salt = message.cache_salt();
  request.adapter = message.adapter();
  request.speculate = message.speculate();
  request.priority = message.priority();
  const v1::ResponseOptions& response = message.response();
  if (response.has_logprobs()) request.logprobs = response.logprobs();
  if (response.has_prompt_logprobs()) request.prompt_logprobs = response.prompt_logprobs();
  return request;
}

void FillSampling(const SamplingParameters& parameters, v1::Sampling& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  for (const auto& [name, value] : EffectsOf(parameters)) {
    const auto* to = v1::Sampling::descriptor()->FindFieldByName(std::string(name));
    if (to->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_FLOAT) {
      reflection.SetFloat(&message, to, static_cast<float>(value));
    } else {
      reflection.SetInt32(&message, to, static_cast<int32_t>(value));
    }
  }
}

void AppendOutput(const OutputPart& part, v1::Output& output) {
  output.set_candidate(static_cast<int32_t>(part.candidate));
  output.mutable_text()->append(part.text);
  output.mutable_token_ids()->Add(part.token_ids.begin(), part.token_ids.end());
  for (size_t i = 0; i < part.details.size(); ++i) {
    FillLogprob(part.token_ids[i], part.details[i], *output.add_logprobs());
  }
  if (part.finish == FinishReason::kNone) return;
  v1::FinishInfo& end = *output.mutable_finish_info();
  const bool length = part.finish == FinishReason::kLength;
  end.set_reason(length ? v1::FINISH_REASON_LENGTH : v1::FINISH_REASON_STOP);
  if (part.finish == FinishReason::kEndToken) end.set_stop_token_id(part.stop_token);
  if (part.finish == FinishReason::kStopString) end.set_stop_string(part.stop_string);
}

void FillEnds(const SessionEvent& event, v1::GenerateResponse& response) {
  if (event.prompt) {
    const RequestSpec& request = event.prompt->request;
    v1::PromptInfo& info = *response.mutable_prompt_info();
    info.set_request_id(request.client_id);
    info.set_prompt_tokens(static_cast<int32_t>(request.prompt.size()));
    info.set_seed(request.sampling.seed);
    info.set_max_new_tokens(request.max_new_tokens);
    const std::vector<TokenDetail>& details = event.prompt->details;
    for (size_t i = 0; i < details.size() && i + 1 < request.prompt.size(); ++i) {
      FillLogprob(request.prompt[i + 1], details[i], *info.add_prompt_logprobs());
    }
  }
  if (event.end) {
    const RequestTimings& timings = event.end->timings;
    v1::Usage& usage = *response.mutable_usage();
    usage.set_prompt_tokens(event.end->prompt_tokens);
    usage.set_completion_tokens(event.end->completion_tokens);
    usage.set_cached_tokens(event.end->cached_tokens);
    usage.set_draft_tokens(timings.draft_tokens);
    usage.set_accepted_draft_tokens(timings.accepted_draft_tokens);
    FillTiming(timings, *response.mutable_timing());
  }
}

void Add(const SessionEvent& event, v1::GenerateResponse& response) {
  if (event.output) AppendOutput(*event.output, CandidateIn(event.output->candidate, response));
  FillEnds(event, response);
}

void Add(const SessionEvent& event, v1::EmbedResponse& response) {
  if (event.output) {
    const std::vector<float>& embedding = event.output->embedding;
    response.mutable_embedding()->Add(embedding.begin(), embedding.end());
  }
  if (event.end) {
    response.set_prompt_tokens(event.end->prompt_tokens);
    FillTiming(event.end->timings, *response.mutable_timing());
  }
}

v1::GenerateResponse ToResponse(const SessionEvent& event) {
  v1::GenerateResponse response;
  if (event.output) AppendOutput(*event.output, *response.mutable_output());
  FillEnds(event, response);
  return response;
}

v1::Output& CandidateIn(uint32_t candidate, v1::GenerateResponse& answer) {
  if (candidate == 0) return *answer.mutable_output();
  const int index = static_cast<int>(candidate) - 1;
  while (answer.more_candidates_size() <= index) answer.add_more_candidates();
  return *answer.mutable_more_candidates(index);
}

void Append(const v1::GenerateResponse& next, v1::GenerateResponse& answer) {
  if (next.has_prompt_info()) *answer.mutable_prompt_info() = next.prompt_info();
  if (next.has_usage()) *answer.mutable_usage() = next.usage();
  if (next.has_timing()) *answer.mutable_timing() = next.timing();
  if (!next.has_output()) return;
  const v1::Output& part = next.output();
  v1::Output& output = CandidateIn(static_cast<uint32_t>(part.candidate()), answer);
  const std::string text = output.text() + part.text();
  output.MergeFrom(part);  // repeated fields are appended, text is replaced
  output.set_text(text);
}

void FillLedgerRecord(const LedgerRecord& record, uint64_t lost, const ApiKey::Terms& reader,
                      v1::LedgerRecord& message) {
  message.set_epoch(record.epoch);
  message.set_iteration(record.iteration);
  message.set_time(record.time);
  const auto shown = [&reader](const std::string& owner) {
    return reader.is_operator || (!reader.owner.empty() && owner == reader.owner);
  };
  for (const LedgerArrival& arrival : record.arrivals) {
    v1::LedgerArrival* out = message.add_arrivals();
    out->set_request(arrival.request);
    out->set_prompt_tokens(arrival.prompt_tokens);
    if (shown(arrival.owner)) out->set_key_name(ApiKey::Terms::NameOf(arrival.owner));
  }
  for (const LedgerMember& member : record.members) {
    v1::LedgerMember* out = message.add_members();
    out->set_request(member.request);
    out->set_tokens(member.tokens);
    out->set_initiation(member.initiation);
  }
  for (const LedgerEnd& end : record.ends) {
    v1::LedgerEnd* out = message.add_ends();
    out->set_request(end.request);
    if (shown(end.owner)) out->set_request_id(end.client_id);
    out->set_prompt_tokens(end.prompt_tokens);
    out->set_output_tokens(end.output_tokens);
    out->set_cached_tokens(end.cached_tokens);
    out->set_draft_tokens(end.timings.draft_tokens);
    out->set_accepted_draft_tokens(end.timings.accepted_draft_tokens);
    out->set_reason(end.reason);
    FillTiming(end.timings, *out->mutable_timing());
  }
  message.set_waiting(record.waiting);
  message.set_running(record.running);
  message.set_free_pages(record.free_pages);
  message.set_total_pages(record.total_pages);
  message.set_schedule(record.schedule);
  message.set_queue(record.queue);
  message.set_compute(record.compute);
  message.set_sample(record.sample);
  message.set_idle(record.idle);
  message.set_receive(record.receive);
  message.set_bubble(record.bubble);
  message.set_stages(record.stages);
  message.set_lost(lost);
  if (const ExpertUse& use = record.experts; use.layers > 0) {
    v1::ExpertUse* const out = message.mutable_experts();
    out->set_layers(use.layers);
    out->set_rows(use.rows);
    out->set_used(use.used);
    out->set_most_rows(use.most_rows);
  }
}

}  // namespace treadle
