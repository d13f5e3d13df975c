#include "server/cli/answer_printer.h"

#include <unistd.h>

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
  switch (reason) {
    case v1::FINISH_REASON_LENGTH:
      return "length";
    case v1::FINISH_REASON_STOP:
      return "stop";
    default:
      return "unknown";
  }
}

void PutCandidate(const v1::Output& output, Json& json) {
  json["text"] = output.text();
  json["token_ids"] =
      Json(std::vector<int32_t>(output.token_ids().begin(), output.token_ids().end()));
  json["logprobs"] = Logprobs(output.logprobs());
  json["finish_reason"] = ReasonName(output.finish_info().reason());
  if (output.finish_info().has_stop_string()) {
    json["stop_string"] = output.finish_info().stop_string();
  }
  if (output.finish_info().has_stop_token_id()) {
    json["stop_token_id"] = output.finish_info().stop_token_id();
  }
}

}  // namespace

AnswerPrinter::AnswerPrinter(const Options& options)
    : options_(options), all_(std::make_unique<v1::GenerateResponse>()) {
  for (int32_t i = 1; i < options.candidates; ++i) all_->add_more_candidates();
}

AnswerPrinter::~AnswerPrinter() = default;

void AnswerPrinter::Add(const v1::GenerateResponse& response) {
  if (response.has_prompt_info()) *all_->mutable_prompt_info() = response.prompt_info();
  if (response.has_usage()) *all_->mutable_usage() = response.usage();
  if (response.has_timing()) *all_->mutable_timing() = response.timing();
  if (!response.has_output()) return;
  const v1::Output& part = response.output();
  v1::Output& output = part.candidate() == 0 ? *all_->mutable_output()
                                             : *all_->mutable_more_candidates(part.candidate() - 1);
  const std::string text = output.text() + part.text();
  output.MergeFrom(part);  // repeated fields are appended, text is replaced
  output.set_text(text);
  if (!options_.json && options_.candidates == 1) {
    std::fwrite(part.text().data(), 1, part.text().size(), stdout);
    std::fflush(stdout);
  }
}

void AnswerPrinter::Finish() {
  if (options_.json) {
    std::printf("%s\n", ToJson().c_str());
    return;
  }
  PrintText();
  if (!isatty(STDERR_FILENO)) return;
  const v1::Usage& usage = all_->usage();
  const v1::Timing& timing = all_->timing();
  std::fprintf(stderr, "[%s; %d prompt tokens, first token after %.3f s; %d tokens in %.3f s]\n",
               ReasonName(all_->output().finish_info().reason()), usage.prompt_tokens(),
               timing.first_token(), usage.completion_tokens(), timing.total());
}

void AnswerPrinter::PrintText() {
  if (options_.candidates == 1) {
    std::printf("\n");
    return;
  }
  std::printf("[0] %s\n", all_->output().text().c_str());
  for (int i = 0; i < all_->more_candidates_size(); ++i) {
    std::printf("[%d] %s\n", i + 1, all_->more_candidates(i).text().c_str());
  }
}

std::string AnswerPrinter::ToJson() const {
  Json json;
  PutCandidate(all_->output(), json);
  if (options_.prompt_logprobs) {
    json["prompt_logprobs"] = Logprobs(all_->prompt_info().prompt_logprobs());
  }
  json["usage"] = {{"prompt_tokens", all_->usage().prompt_tokens()},
                   {"completion_tokens", all_->usage().completion_tokens()}};
  json["timing"] = {{"queued", all_->timing().queued()},
                    {"first_token", all_->timing().first_token()},
                    {"total", all_->timing().total()}};
  json["seed"] = all_->prompt_info().seed();
  if (all_->more_candidates_size() > 0) json["more_candidates"] = Json::array();
  for (const v1::Output& output : all_->more_candidates()) {
    Json candidate;
    PutCandidate(output, candidate);
    json["more_candidates"].push_back(std::move(candidate));
  }
  return json.dump();
}

}  // namespace treadle
