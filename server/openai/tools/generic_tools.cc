#include "server/openai/tools/generic_tools.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/openai/json/json_text.h"
#include "server/openai/tools/tool_calls.h"

namespace treadle {
namespace {

std::string CallText(std::string_view name, std::string_view arguments) {
  const ToolFormat& format = GenericToolFormat();
  return Str(format.Begin(name), arguments, format.End());
}

std::string Instructions(std::string_view tools) {
  std::string text =
      "# Tools\n\nYou may call functions. Each line describes one, with a JSON schema of its "
      "parameters:\n";
  for (const auto& tool : nlohmann::ordered_json::parse(tools)) {
    text += tool.value("function", nlohmann::ordered_json()).dump() + "\n";
  }
  return Str(text, "\nTo call a function, write its name and its arguments as JSON, like this:\n",
             CallText("NAME", "{\"PARAMETER\": \"VALUE\"}"),
             "\nThe results come back between <tool_response> and </tool_response>.");
}

// Whether a system's message is in the prompt.
bool TakesSystem(const ChatTemplate& chat_template) {
  constexpr char kText[] = "rules of the system";
  const auto prompt = chat_template.Render({{"system", kText}, {"user", "a"}}, {});
  return prompt.ok() && prompt->find(kText) != prompt->npos;
}

// Behind what it says already, or before.
void AddTo(std::optional<std::string>& content, const std::string& text, bool before = false) {
  if (content.value_or("").empty()) {
    content = text;
  } else {
    content = before ? Str(text, "\n\n", *content) : Str(*content, "\n", text);
  }
}

}  // namespace

void WriteToolsAsText(std::string_view tools, const ChatTemplate& chat_template,
                      std::vector<ChatMessage>& messages) {
  std::vector<ChatMessage> written;
  for (ChatMessage& message : messages) {
    for (const ToolCall& call : std::exchange(message.tool_calls, {})) {
      AddTo(message.content, CallText(call.name, call.arguments));
    }
    const bool result = message.role == "tool";
    if (result) {
      message = {"user",
                 Str("<tool_response>\n", message.content.value_or(""), "\n</tool_response>")};
    }
    // Many templates want user and assistant to take turns.
    const bool same = !written.empty() && written.back().role == message.role;
    if (same && message.role == "user" &&
        (result || written.back().content->ends_with("</tool_response>"))) {
      AddTo(written.back().content, *message.content);
    } else {
      written.push_back(std::move(message));
    }
  }
  messages = std::move(written);
  if (tools.empty() || messages.empty()) return;
  const std::string text = Instructions(tools);
  if (messages[0].role == "system") {
    AddTo(messages[0].content, "\n" + text);
  } else if (TakesSystem(chat_template)) {
    messages.insert(messages.begin(), {"system", text});
  } else {
    AddTo(messages[0].content, text, /*before=*/true);
  }
}

}  // namespace treadle
