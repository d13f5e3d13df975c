#include "server/openai/openai_messages.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/json/json_fields.h"
#include "server/openai/tools/tool_request.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// Members that clients send back with what a server told them, or that steer another server's
// cache. A template's prompt does not have them.
constexpr std::string_view kPassedOver[] = {"annotations", "cache_control", "parsed",
                                            "provider_specific_fields", "reasoning_details"};

bool IsPassedOver(std::string_view key, const Json& value) {
  return value.is_null() || std::ranges::count(kPassedOver, key) > 0;
}

// Parts of a content that are text: the type is the name of the member that has it.
constexpr std::string_view kTextParts[] = {"text", "refusal"};

// A string, or an array of parts of text, each of which becomes a line.
absl::StatusOr<std::string> ReadContent(const std::string& name, const Json& value) {
  if (!value.is_array()) return ReadText(name, value);
  std::string text;
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string part = Str(name, "[", i, "]");
    if (!value[i].is_object()) return Expected(part, value[i], "an object");
    const Json type = value[i].value("type", Json());
    const std::string member = type.is_string() ? type.get<std::string>() : "";
    if (std::ranges::count(kTextParts, member) == 0) {
      return Expected(part + ".type", type, "\"text\"");
    }
    for (const auto& [key, other] : value[i].items()) {
      if (key == "type" || key == member || IsPassedOver(key, other)) continue;
      return InvalidArgument(part, ".", Cut(Printable(key), kShown), " is not supported");
    }
    TREADLE_ASSIGN_OR_RETURN(const std::string read,
                             ReadText(part + "." + member, value[i].value(member, Json())));
    text += (i > 0 ? "\n" : "") + read;
  }
  return text;
}

// `tools`: the names of those that were called, by the calls' ids.
absl::StatusOr<ChatMessage> ReadMessage(const std::string& name, const Json& value,
                                        std::map<std::string, std::string>& tools) {
  if (!value.is_object()) return Expected(name, value, "an object");
  ChatMessage message;
  TREADLE_ASSIGN_OR_RETURN(message.role, ReadText(name + ".role", value.value("role", Json())));
  const bool assistant = message.role == "assistant", tool = message.role == "tool";
  for (const auto& [key, field] : value.items()) {
    const std::string where = name + "." + key;
    if (key == "role" || IsPassedOver(key, field)) continue;
    if (key == "content" || (key == "refusal" && assistant)) {
      TREADLE_ASSIGN_OR_RETURN(std::string text, ReadContent(where, field));
      if (!message.content) message.content = std::move(text);  // the refusal comes later
    } else if (key == "tool_calls" && assistant) {
      TREADLE_ASSIGN_OR_RETURN(message.tool_calls, ReadToolCalls(where, field));
    } else if (key == "tool_call_id" && tool) {
      TREADLE_ASSIGN_OR_RETURN(message.tool_call_id, ReadText(where, field));
    } else if (key == "reasoning_content" || key == "reasoning") {  // the same, by two names
      if (!assistant) continue;
      TREADLE_ASSIGN_OR_RETURN(message.reasoning, ReadText(where, field));
    } else if (key == "name") {
      TREADLE_ASSIGN_OR_RETURN(message.name, ReadText(where, field));
    } else {
      return InvalidArgument(name, ".", Cut(Printable(key), kShown),
                             " is not supported in a message of this role");
    }
  }
  if (!message.content && message.tool_calls.empty()) {
    return InvalidArgument(name, ".content is missing");
  }
  if (tool && message.tool_call_id.empty()) {
    return InvalidArgument(name, ".tool_call_id is missing");
  }
  for (const ToolCall& call : message.tool_calls) tools[call.id] = call.name;
  if (tool && message.name.empty()) message.name = tools[message.tool_call_id];
  // Newer clients call so the instructions that templates know as the system's.
  if (message.role == "developer") message.role = "system";
  return message;
}

}  // namespace

absl::StatusOr<std::vector<ChatMessage>> ReadMessages(const Json& value) {
  if (!value.is_array()) return Expected("messages", value, "an array of messages");
  std::vector<ChatMessage> messages;
  std::map<std::string, std::string> tools;
  for (size_t i = 0; i < value.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(messages.emplace_back(),
                             ReadMessage(Str("messages[", i, "]"), value[i], tools));
  }
  return messages;
}

}  // namespace treadle
