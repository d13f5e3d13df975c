#include "server/anthropic/messages_answer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/status.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_call.h"
#include "server/openai/openai_errors.h"

namespace treadle {
namespace {

std::string Event(std::string_view type, const std::string& members) {
  return Str("event: ", type, "\ndata: {\"type\":\"", type, '"', members, "}\n\n");
}

}  // namespace

MessagesAnswer::MessagesAnswer(const ServedModel& model, const OpenAiRequest& request,
                               std::string id)
    : BlockAnswer(request),
      name_(model.NameFor(request.common.adapter)),
      id_(std::move(id)),
      max_tokens_(request.common.stopping.max_new_tokens.value_or(0)) {}

std::string MessagesAnswer::NewBlockId(Kind /*kind*/, const std::string& call) const {
  return call;
}

std::string MessagesAnswer::BlockText(const Block& block, const std::string& text) {
  switch (block.kind) {
    case Kind::kReasoning:
      return Str(R"({"type":"thinking","thinking":)", JsonString(text), R"(,"signature":""})");
    case Kind::kText:
      return Str(R"({"type":"text","text":)", JsonString(text), R"(,"citations":null})");
    case Kind::kCall:
      break;
  }
  return Str(R"({"type":"tool_use","id":)", JsonString(block.id), R"(,"name":)",
             JsonString(block.called), R"(,"input":)", text.empty() ? "{}" : text, "}");
}

std::string MessagesAnswer::Usage() const {
  return Str(R"("usage":{"input_tokens":)", prompt_tokens() - cached_tokens(),
             R"(,"cache_creation_input_tokens":0,"cache_read_input_tokens":)", cached_tokens(),
             R"(,"output_tokens":)", completion_tokens(),
             R"(,"output_tokens_details":{"thinking_tokens":)", reasoning_tokens(), "}}");
}

std::string MessagesAnswer::Stop() const {
  const char* reason = called() ? "tool_use" : "end_turn";
  if (finish() == FinishReason::kStopString) reason = "stop_sequence";
  if (finish() == FinishReason::kLength) {
    reason = completion_tokens() < max_tokens_ ? "model_context_window_exceeded" : "max_tokens";
  }
  return Str(R"("stop_reason":")", reason, R"(","stop_sequence":)",
             finish() == FinishReason::kStopString ? JsonString(stop_string()) : "null");
}

std::string MessagesAnswer::Message(const std::string& content, const std::string& stop) const {
  return Str(R"({"id":)", JsonString(id_), R"(,"type":"message","role":"assistant","model":)",
             JsonString(name_), R"(,"content":[)", content, "],", stop, ",", Usage(), "}");
}

std::string MessagesAnswer::Whole() const {
  std::string content;
  for (const Block& block : blocks()) {
    content += (block.index > 0 ? "," : "") + BlockText(block, block.text);
  }
  return Message(content, Stop());
}

std::string MessagesAnswer::Begin() {
  return Event("message_start",
               R"(,"message":)" + Message("", R"("stop_reason":null,"stop_sequence":null)")) +
         Event("ping", "");
}

std::string MessagesAnswer::BeginBlock(const Block& block) {
  return Event("content_block_start",
               Str(R"(,"index":)", block.index, R"(,"content_block":)", BlockText(block, "")));
}

std::string MessagesAnswer::GrowBlock(const Block& block, std::string_view text) {
  constexpr const char* kDeltas[] = {R"("thinking_delta","thinking":)", R"("text_delta","text":)",
                                     R"("input_json_delta","partial_json":)"};  // by Kind
  return Event("content_block_delta",
               Str(R"(,"index":)", block.index, R"(,"delta":{"type":)",
                   kDeltas[static_cast<size_t>(block.kind)], JsonString(text), "}"));
}

std::string MessagesAnswer::EndBlock(const Block& block) {
  return Event("content_block_stop", Str(R"(,"index":)", block.index));
}

std::string MessagesAnswer::End() {
  return Event("message_delta", Str(R"(,"delta":{)", Stop(), "},", Usage())) +
         Event("message_stop", "");
}

std::string MessagesAnswer::ErrorEvent(const HttpResponse& error) {
  return "event: error\ndata: " + error.body + "\n\n";
}

HttpResponse MessagesError(const absl::Status& status) {
  constexpr std::pair<int, const char*> kTypes[] = {
      {401, "authentication_error"}, {403, "permission_error"}, {404, "not_found_error"},
      {429, "rate_limit_error"},     {503, "overloaded_error"}, {504, "timeout_error"}};
  HttpResponse error = OpenAiError(status, OpenAiKind::kMessage);
  const auto* const found =
      std::ranges::find(kTypes, error.code, &std::pair<int, const char*>::first);
  const char* const type = found != std::end(kTypes) ? found->second
                           : error.code < 500        ? "invalid_request_error"
                                                     : "api_error";
  const auto message = nlohmann::json::parse(error.body)["error"]["message"].get<std::string>();
  error.body = Str(R"({"type":"error","error":{"type":")", type, R"(","message":)",
                   JsonString(message), "}}");
  return error;
}

}  // namespace treadle
