// A model that the readers of requests may ask, with a chat template that shows what it was given.
#pragma once

#include <string>

#include "server/openai/openai_request.h"
#include "server/session/request_validation.h"
#include "server/session/served_model.h"
#include "server/session/session.h"
#include "tests/server/byte_tokenizer.h"

namespace treadle {

// Tools, messages and calls as templates of Hermes' form write them, in short.
inline constexpr char kToolTemplate[] =
    R"({% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %})"
    R"({% for m in messages %}[{{ m.role }}]{% if m.content is not none %}{{ m.content }})"
    R"({% endif %}{% for c in m.tool_calls %}<tool_call>{"name": "{{ c.function.name }}", )"
    R"("arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %})"
    R"({% if m.role == 'tool' %}({{ m.name }}, {{ m.tool_call_id }}){% endif %}{% endfor %})";

// The two tools, `weather` and `time`, that tests offer, as a template writes them.
inline constexpr char kToolsOfChat[] =
    R"(<tools>{"type": "function", "function": {"name": "weather", "description": "now", )"
    R"("parameters": {"type": "object", "properties": {"city": {}, "at": {}}}}})"
    R"({"type": "function", "function": {"name": "time"}}</tools>)";

inline ServedModel ChatModel(const char* chat_template = kToolTemplate) {
  ServedModel model;
  model.name = "m";
  model.fingerprint = "fp_1";
  model.vocab = 258;
  model.max_context = 4096;
  model.kv_pages = 512;
  model.paging.page_size = 16;
  model.tokenizer = ByteTokenizer::Make();
  model.end_ids = {ByteTokenizer::kEnd};
  model.chat_template = *ChatTemplate::Parse(chat_template);
  return model;
}

// The prompt's text; or the error.
inline std::string RenderedPrompt(const ServedModel& model,
                                  const absl::StatusOr<OpenAiRequest>& read) {
  if (!read.ok()) return std::string(read.status().message());
  GenerateRequest request = read->For(0);
  const auto ids = PromptIds(request, model, Clock::time_point::max());
  return ids.ok() ? model.tokenizer->Decode(*ids, /*special=*/true)
                  : std::string(ids.status().message());
}

// The prompt's text of a request that is valid, or the error.
inline std::string ValidPrompt(const ServedModel& model, const std::string& body,
                               bool chat = true) {
  const auto read = ReadOpenAiRequest(body, chat, model);
  if (!read.ok()) return std::string(read.status().message());
  const auto valid = ValidateRequest(read->For(0), model, {}, 1);
  if (!valid.ok()) return std::string(valid.status().message());
  return model.tokenizer->Decode(valid->spec.prompt, /*special=*/true);
}

// Tells an answer of a prompt of five tokens, two of which were cached.
template <typename Answer>
void AddPrompt(Answer& answer) {
  const RequestSpec spec{.prompt = {1, 2, 3, 4, 5}};
  const SessionEvent::Prompt prompt{.request = spec, .details = {}, .cached_tokens = 2};
  SessionEvent event;
  event.prompt = &prompt;
  answer.Add(0, event);
}

// Tells an answer of a part, and of the end if it is the last one.
template <typename Answer>
void AddOutput(Answer& answer, const OutputPart& part) {
  const SessionEvent::End end;
  SessionEvent event;
  event.output = &part;
  if (part.finish != FinishReason::kNone) event.end = &end;
  answer.Add(0, event);
}

}  // namespace treadle
