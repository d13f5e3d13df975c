// A model that the readers of requests may ask, with a chat template that shows what it was given.
#pragma once

#include <string>

#include "server/openai/openai_request.h"
#include "server/session/request_validation.h"
#include "server/session/served_model.h"
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

}  // namespace treadle
