#include "tests/server/cli/streamed_answers.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

const char kSchema[] =
    R"({"type":"object","properties":{"name":{"type":"string","maxLength":9},)"
    R"("old":{"type":"boolean"}},"required":["name","old"],"additionalProperties":false})";

// Arrays entry by entry, so that it does not show where they were cut.
void Add(const std::string& name, const Json& value, Said& said) {
  if (value.is_object()) {
    for (const auto& [key, inner] : value.items()) Add(name + "." + key, inner, said);
  } else if (value.is_array()) {
    for (const Json& entry : value) said[name] += entry.dump() + ",";
  } else if (value.is_string()) {
    said[name] += value.get<std::string>();
  } else if (!value.is_null()) {
    said[name] += value.dump();
  }
}

}  // namespace

v1::GenerateRequest RequestOfKind(int kind) {
  v1::GenerateRequest request;
  for (int i = 0; i < 1 + kind * 173 % 600; ++i) {
    request.mutable_token_ids()->add_ids((kind * 31 + i * 7) % 256);
  }
  v1::Sampling& sampling = *request.mutable_sampling();
  sampling.set_temperature(kind % 3 == 0 ? 0.0f : 0.9f);
  sampling.set_seed(static_cast<uint64_t>(kind));
  if (kind % 4 == 1) sampling.set_num_candidates(3);
  if (kind % 5 == 2) sampling.set_repetition_penalty(1.3f);
  if (kind % 5 == 3) sampling.set_frequency_penalty(0.5f);
  v1::Stopping& stopping = *request.mutable_stopping();
  stopping.set_max_new_tokens(20 + kind * 97 % 300);
  stopping.set_ignore_eos(kind % 2 == 0);
  if (kind % 8 == 6) {
    for (const char* text : {"e", "zq"}) stopping.add_stop_strings(text);
  }
  if (kind % 8 == 7) request.mutable_constraint()->set_json_schema(kSchema);
  request.mutable_response()->set_logprobs(kind % 3);
  if (kind % 6 == 4) request.mutable_response()->set_prompt_logprobs(1);
  return request;
}

OpenAiBody OpenAiBodyOfKind(int kind) {
  const v1::GenerateRequest request = RequestOfKind(kind);
  const v1::Sampling& sampling = request.sampling();
  const bool chat = request.has_constraint();
  Json body = {{"stream", true},
               {"return_token_ids", true},
               {"max_tokens", request.stopping().max_new_tokens()},
               {"ignore_eos", request.stopping().ignore_eos()},
               {"temperature", sampling.temperature()},
               {"seed", sampling.seed()}};
  if (sampling.has_num_candidates()) body["n"] = sampling.num_candidates();
  if (sampling.has_frequency_penalty()) body["frequency_penalty"] = sampling.frequency_penalty();
  for (const std::string& text : request.stopping().stop_strings()) body["stop"].push_back(text);
  if (chat) {
    body["messages"] = {{{"role", "user"}, {"content", Str("Request ", kind)}}};
    body["logprobs"] = true;
    body["response_format"] = {
        {"type", "json_schema"},
        {"json_schema", {{"name", "answer"}, {"schema", Json::parse(kSchema)}}}};
  } else {
    body["prompt"] = request.token_ids().ids();
    body["logprobs"] = request.response().logprobs();
  }
  return {chat ? "/v1/chat/completions" : "/v1/completions", body.dump()};
}

void Hear(const v1::GenerateResponse& message, Said& said) {
  for (const auto& about : message.prompt_info().prompt_logprobs()) {
    said["prompt logprobs"] += about.SerializeAsString();
  }
  if (!message.has_output()) return;
  const v1::Output& output = message.output();
  const std::string candidate = Str(output.candidate(), " ");
  said[candidate + "text"] += output.text();
  for (const int id : output.token_ids()) said[candidate + "tokens"] += Str(id, ",");
  for (const auto& about : output.logprobs()) {
    said[candidate + "logprobs"] += about.SerializeAsString();
  }
  said[candidate + "end"] += output.finish_info().SerializeAsString();
}

bool Hear(const std::string& json, Said& said) {
  const Json event = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (event.is_discarded() || !event.contains("choices")) return false;
  for (Json choice : event["choices"]) {
    const std::string name = choice["index"].dump();
    choice.erase("index");
    Add(name, choice, said);
  }
  return true;
}

std::string Beyond(const Said& said, const Said& whole) {
  for (const auto& [name, text] : said) {
    const auto reference = whole.find(name);
    const std::string& right = reference == whole.end() ? "" : reference->second;
    if (right.starts_with(text)) continue;
    const auto differs = std::ranges::mismatch(text, right).in1 - text.begin();
    return Str("'", name, "' of ", text.size(), " bytes is no beginning of the right ",
               right.size(), ": byte ", differs, " differs");
  }
  return "";
}

}  // namespace treadle
