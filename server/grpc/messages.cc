#include "server/grpc/messages.h"

#include "server/grpc/inference.pb.h"

namespace treadle {
namespace {

void FillLogprob(int32_t token, const TokenDetail& detail, v1::TokenLogprob& out) {
  out.set_token_id(token);
  out.set_logprob(detail.logprob);
  for (const TokenLogprob& top : detail.top) {
    v1::TopLogprob* entry = out.add_top();
    entry->set_token_id(top.token);
    entry->set_logprob(top.logprob);
  }
}

void FillTiming(const RequestTimings& timings, v1::Timing& out) {
  out.set_queued(timings.queued);
  out.set_first_token(timings.first_token);
  out.set_total(timings.total);
}

}  // namespace

void FillPromptInfo(const RequestSpec& spec, const std::vector<TokenDetail>& details,
                    v1::PromptInfo& info) {
  info.set_request_id(spec.client_id);
  info.set_prompt_tokens(static_cast<int32_t>(spec.prompt.size()));
  info.set_seed(spec.sampling.seed);
  info.set_max_new_tokens(spec.max_new_tokens);
  for (size_t i = 0; i < details.size() && i + 1 < spec.prompt.size(); ++i) {
    FillLogprob(spec.prompt[i + 1], details[i], *info.add_prompt_logprobs());
  }
}

void AppendOutput(const OutputPart& part, v1::Output& output) {
  output.set_candidate(static_cast<int32_t>(part.candidate));
  output.mutable_text()->append(part.text);
  output.mutable_token_ids()->Add(part.token_ids.begin(), part.token_ids.end());
  for (size_t i = 0; i < part.details.size(); ++i) {
    FillLogprob(part.token_ids[i], part.details[i], *output.add_logprobs());
  }
  switch (part.finish) {
    case FinishReason::kNone:
      return;  // an error ends the call with its status instead
    case FinishReason::kLength:
      output.mutable_finish_info()->set_reason(v1::FINISH_REASON_LENGTH);
      return;
    case FinishReason::kEndToken:
      output.mutable_finish_info()->set_reason(v1::FINISH_REASON_STOP);
      output.mutable_finish_info()->set_stop_token_id(part.stop_token);
      return;
    case FinishReason::kStopString:
      output.mutable_finish_info()->set_reason(v1::FINISH_REASON_STOP);
      output.mutable_finish_info()->set_stop_string(part.stop_string);
      return;
  }
}

void FillEnd(int32_t prompt_tokens, int32_t completion_tokens, const RequestTimings& timings,
             v1::GenerateResponse& response) {
  response.mutable_usage()->set_prompt_tokens(prompt_tokens);
  response.mutable_usage()->set_completion_tokens(completion_tokens);
  FillTiming(timings, *response.mutable_timing());
}

void FillLedgerRecord(const LedgerRecord& record, uint64_t lost, v1::LedgerRecord& message) {
  message.set_epoch(record.epoch);
  message.set_iteration(record.iteration);
  message.set_time(record.time);
  for (const LedgerMember& member : record.members) {
    v1::LedgerMember* out = message.add_members();
    out->set_request(member.request);
    out->set_tokens(member.tokens);
    out->set_initiation(member.initiation);
  }
  for (const LedgerEnd& end : record.ends) {
    v1::LedgerEnd* out = message.add_ends();
    out->set_request(end.request);
    out->set_request_id(end.client_id);
    out->set_prompt_tokens(end.prompt_tokens);
    out->set_output_tokens(end.output_tokens);
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
}

}  // namespace treadle
