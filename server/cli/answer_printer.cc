#include "server/cli/answer_printer.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "server/grpc/inference.pb.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

Json Logprobs(const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& entries) {
  Json all = Json::array();
  for (const v1::TokenLogprob& entry : entries) {
    Json top = Json::array();
    for (const v1::TopLogprob& other : entry.top()) {
      top.push_back({{"token_id", other.token_id()}, {"logprob", other.logprob()}});
    }
    all.push_back({{"token_id", entry.token_id()}, {"logprob", entry.logprob()}, {"top", top}});
  }
  return all;
}

const char* ReasonName(v1::FinishReason reason) {
  if (reason == v1::FINISH_REASON_LENGTH) return "length";
  return reason == v1::FINISH_REASON_STOP ? "stop" : "unknown";
}

Json Candidate(const v1::Output& output) {
  const v1::FinishInfo& end = output.finish_info();
  Json json;
  json["text"] = output.text();
  json["token_ids"] = std::vector<int32_t>(output.token_ids().begin(), output.token_ids().end());
  json["logprobs"] = Logprobs(output.logprobs());
  json["finish_reason"] = ReasonName(end.reason());
  if (end.has_stop_string()) json["stop_string"] = end.stop_string();
  if (end.has_stop_token_id()) json["stop_token_id"] = end.stop_token_id();
  return json;
}

}  // namespace

std::string AnswerToJson(const v1::GenerateResponse& answer, bool prompt_logprobs) {
  Json json = Candidate(answer.output());
  if (prompt_logprobs) {
    json["prompt_logprobs"] = Logprobs(answer.prompt_info().prompt_logprobs());
  }
  json["usage"] = {{"prompt_tokens", answer.usage().prompt_tokens()},
                   {"completion_tokens", answer.usage().completion_tokens()}};
  json["timing"] = {{"queued", answer.timing().queued()},
                    {"first_token", answer.timing().first_token()},
                    {"total", answer.timing().total()}};
  json["seed"] = answer.prompt_info().seed();
  for (const v1::Output& output : answer.more_candidates()) {
    json["more_candidates"].push_back(Candidate(output));
  }
  return json.dump();
}

void PrintCandidates(const v1::GenerateResponse& answer) {
  std::printf("[0] %s\n", answer.output().text().c_str());
  for (int i = 0; i < answer.more_candidates_size(); ++i) {
    std::printf("[%d] %s\n", i + 1, answer.more_candidates(i).text().c_str());
  }
}

void PrintSummary(const v1::GenerateResponse& answer) {
  std::fprintf(stderr, "[%s; %d prompt tokens, first token after %.3f s; %d tokens in %.3f s]\n",
               ReasonName(answer.output().finish_info().reason()), answer.usage().prompt_tokens(),
               answer.timing().first_token(), answer.usage().completion_tokens(),
               answer.timing().total());
}

}  // namespace treadle
