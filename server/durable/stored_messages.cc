#include "server/durable/stored_messages.h"

#include <utility>

#include "base/status.h"
#include "server/durable/stored.pb.h"

namespace treadle {
namespace {

void Fill(const TokenDetail& detail, stored::Logprob& out) {
  out.set_logprob(detail.logprob);
  for (const TokenLogprob& top : detail.top) {
    out.add_top_tokens(top.token);
    out.add_top_logprobs(top.logprob);
  }
}

TokenDetail DetailOf(const stored::Logprob& from) {
  TokenDetail detail{.logprob = from.logprob(), .top = {}};
  for (int i = 0; i < from.top_tokens_size() && i < from.top_logprobs_size(); ++i) {
    detail.top.push_back({from.top_tokens(i), from.top_logprobs(i)});
  }
  return detail;
}

absl::Status Broken(const char* what) {
  return absl::DataLossError(Str("what is stored of the request is not ", what));
}

}  // namespace

std::string ToBytes(const StoredRequest& request) {
  stored::Request message;
  message.set_kind(request.kind);
  message.set_body(request.body);
  message.set_created(request.created);
  message.set_fingerprint(request.fingerprint);
  message.mutable_prompt()->Add(request.prompt.begin(), request.prompt.end());
  message.set_seed(request.seed);
  message.set_max_new_tokens(request.max_new_tokens);
  message.set_adapter(request.adapter);
  return message.SerializeAsString();
}

std::string ToBytes(const StreamBatch& piece) {
  stored::Piece message;
  if (!piece.tokens.empty()) {
    for (const TokenDetail& detail : piece.prompt_detail) Fill(detail, *message.add_prompt());
  }
  for (const StreamToken& token : piece.tokens) {
    stored::Token& out = *message.add_tokens();
    out.set_candidate(token.candidate);
    out.set_token(token.token);
    out.set_finish(static_cast<uint32_t>(token.finish));
    if (token.detail.logprob != 0 || !token.detail.top.empty()) {
      Fill(token.detail, *out.mutable_detail());
    }
  }
  if (piece.ended && piece.status.ok()) {
    message.mutable_end()->set_queued(piece.timings.queued);
    message.mutable_end()->set_first_token(piece.timings.first_token);
    message.mutable_end()->set_total(piece.timings.total);
  }
  return message.SerializeAsString();
}

absl::StatusOr<StoredRequest> RequestFromBytes(std::string_view bytes) {
  stored::Request message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Broken("a request");
  }
  return StoredRequest{.kind = message.kind(),
                       .body = message.body(),
                       .created = message.created(),
                       .fingerprint = message.fingerprint(),
                       .prompt = {message.prompt().begin(), message.prompt().end()},
                       .seed = message.seed(),
                       .max_new_tokens = message.max_new_tokens(),
                       .adapter = message.adapter()};
}

absl::Status AddPiece(std::string_view bytes, StreamBatch& answer) {
  stored::Piece message;
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Broken("a piece of an answer");
  }
  for (const stored::Logprob& detail : message.prompt()) {
    answer.prompt_detail.push_back(DetailOf(detail));
  }
  for (const stored::Token& token : message.tokens()) {
    if (token.finish() > static_cast<uint32_t>(FinishReason::kPooled)) return Broken("an answer");
    answer.tokens.push_back({.candidate = token.candidate(),
                             .token = token.token(),
                             .detail = DetailOf(token.detail()),
                             .finish = static_cast<FinishReason>(token.finish())});
  }
  if (message.has_end()) {
    answer.ended = true;
    answer.timings = {message.end().queued(), message.end().first_token(), message.end().total()};
  }
  return absl::OkStatus();
}

}  // namespace treadle
