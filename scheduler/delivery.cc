#include "scheduler/delivery.h"

#include <utility>

namespace treadle {
namespace {

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

RequestTimings TimingsOf(const Request& request, Clock::time_point now) {
  const Clock::time_point unset;
  RequestTimings timings;
  timings.total = Seconds(now - request.arrival);
  timings.queued =
      request.begun == unset ? timings.total : Seconds(request.begun - request.arrival);
  if (request.first_token != unset) {
    timings.first_token = Seconds(request.first_token - request.arrival);
  }
  timings.draft_tokens = request.draft_tokens;
  timings.accepted_draft_tokens = request.accepted_draft_tokens;
  return timings;
}

const char* ReasonOf(const Request& request, const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      // Any candidate that was cut off makes it a matter of length.
      for (const Sequence& sequence : request.sequences) {
        if (sequence.finish == FinishReason::kLength) return "length";
      }
      return "stop";
    case absl::StatusCode::kCancelled:
      return "cancelled";
    case absl::StatusCode::kDeadlineExceeded:
      return "deadline";
    case absl::StatusCode::kResourceExhausted:
      return "refused";
    default:
      return "error";
  }
}

LedgerEnd EndOf(const Request& request, const absl::Status& status, Clock::time_point now) {
  LedgerEnd end;
  end.request = request.id;
  end.client_id = request.spec.client_id;
  end.owner = request.spec.owner;
  end.internal = request.spec.internal;
  end.prompt_tokens = request.prompt_length();
  end.cached_tokens = request.cached_tokens.value_or(0);
  for (const Sequence& sequence : request.sequences) end.output_tokens += sequence.produced;
  end.reason = ReasonOf(request, status);
  end.predicted_first_token = request.predicted_first_token.value_or(-1);
  end.timings = TimingsOf(request, now);
  return end;
}

void PushAll(TokenStream& stream, std::vector<TokenDetail>& prompt,
             std::vector<StreamToken>& tokens) {
  stream.PushPrompt(std::exchange(prompt, {}));
  for (StreamToken& token : tokens) stream.Push(std::move(token));
  tokens.clear();
}

}  // namespace

void Delivery::Token(Request& request, StreamToken token) {
  if (when_ == Policy::Delivery::kAsGenerated) {
    request.stream->Push(std::move(token));
  } else {
    request.held_tokens.push_back(std::move(token));
  }
}

void Delivery::Prompt(Request& request, std::vector<TokenDetail> details) {
  if (when_ == Policy::Delivery::kAsGenerated) {
    request.stream->PushPrompt(std::move(details));
  } else {
    request.held_prompt.insert(request.held_prompt.end(), std::make_move_iterator(details.begin()),
                               std::make_move_iterator(details.end()));
  }
}

void Delivery::End(Request& request, const absl::Status& status, Clock::time_point now) {
  LedgerEnd end = EndOf(request, status, now);
  if (when_ == Policy::Delivery::kWhenIdle && status.ok()) {
    held_.push_back({request.stream, std::exchange(request.held_tokens, {}),
                     std::exchange(request.held_prompt, {}), request.arrival, std::move(end)});
    return;
  }
  PushAll(*request.stream, request.held_prompt, request.held_tokens);
  request.stream->End(status, end.timings);
  ends_.push_back(std::move(end));
}

void Delivery::Flush(Clock::time_point now) {
  for (Held& held : held_) {
    RequestTimings& timings = held.end.timings;
    timings.total = Seconds(now - held.arrival);
    if (held.end.output_tokens > 0) timings.first_token = timings.total;
    PushAll(*held.stream, held.prompt, held.tokens);
    held.stream->End(absl::OkStatus(), timings);
    ends_.push_back(std::move(held.end));
  }
  held_.clear();
}

std::vector<LedgerEnd> Delivery::TakeEnds() { return std::exchange(ends_, {}); }

}  // namespace treadle
