#include "server/anthropic/messages_request.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/json_file.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/body_fields.h"
#include "server/openai/tools/tool_request.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using Ordered = nlohmann::ordered_json;

struct MessagesRequest : OpenAiRequest {
  std::string_view body = {};
  std::string system = {};
  std::vector<ChatMessage> messages = {};
  std::map<std::string, std::string> called = {};  // names of tools, by the ids of their calls
};

// Members that steer Anthropic's cache, or come back with what a server told.
constexpr std::string_view kPassedOver[] = {
    "cache_control", "caller", "citations", "is_error", "signature", "toolset_name", "type"};

void AddLine(std::string text, std::optional<std::string>& to) {
  to = to ? *to + "\n" + text : std::move(text);
}

// A text, or an array of blocks, each of which `read` reads by its type.
template <typename ReadBlock>
absl::Status ReadContent(const std::string& name, const Json& value, std::optional<std::string>& to,
                         ReadBlock read) {
  if (value.is_string()) {
    AddLine(value.get<std::string>(), to);
    return absl::OkStatus();
  }
  if (!value.is_array()) return Expected(name, value, "a string or an array of blocks");
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string block = Str(name, "[", i, "]");
    if (!value[i].is_object()) return Expected(block, value[i], "an object");
    const Json type = value[i].value("type", Json());
    if (type == "text") {
      std::string text;
      const auto read_text = [&](const auto& where, const Json& given) {
        return Set(ReadText(where, given), text);
      };
      TREADLE_RETURN_IF_ERROR(ReadMembers(block, value[i], {{"text", read_text}}, kPassedOver));
      AddLine(std::move(text), to);
      continue;
    }
    TREADLE_RETURN_IF_ERROR(read(block, i, type));
  }
  return absl::OkStatus();
}

absl::Status ReadTexts(const std::string& name, const Json& value, std::optional<std::string>& to) {
  return ReadContent(name, value, to, [](const auto& block, size_t, const Json& type) {
    return Expected(block + ".type", type, "\"text\": the model reads no other blocks here");
  });
}

// A call that the assistant made. `written`: the block, with members in their order.
absl::Status ReadToolUse(const std::string& name, const Json& block, const Ordered& written,
                         ChatMessage& to) {
  ToolCall& call = to.tool_calls.emplace_back();
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, block,
      {{"id",
        [&](const auto& where, const Json& text) { return Set(ReadText(where, text), call.id); }},
       {"name",
        [&](const auto& where, const Json& text) { return Set(ReadText(where, text), call.name); }},
       {"input",
        [&](const auto& where, const Json& input) -> absl::Status {
          if (!input.is_object()) return Expected(where, input, "an object");
          call.arguments = written["input"].dump();
          return absl::OkStatus();
        }}},
      kPassedOver));
  TREADLE_RETURN_IF_ERROR(Required(name + ".id", call.id));
  TREADLE_RETURN_IF_ERROR(Required(name + ".name", call.name));
  return Required(name + ".input", call.arguments);
}

absl::StatusOr<ChatMessage> ReadToolResult(const std::string& name, const Json& block,
                                           const MessagesRequest& request) {
  ChatMessage result{.role = "tool"};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, block,
      {{"tool_use_id",
        [&](const auto& where, const Json& text) {
          return Set(ReadText(where, text), result.tool_call_id);
        }},
       {"content", [&](const auto& where,
                       const Json& value) { return ReadTexts(where, value, result.content); }}},
      kPassedOver));
  TREADLE_RETURN_IF_ERROR(Required(name + ".tool_use_id", result.tool_call_id));
  const auto called = request.called.find(result.tool_call_id);
  if (called == request.called.end()) {
    return InvalidArgument(name, ".tool_use_id is ", Json(Cut(result.tool_call_id, kShown)).dump(),
                           ", expected the id of a tool_use block before it");
  }
  result.name = called->second;
  if (!result.content) result.content = "";
  return result;
}

// One message becomes several: results of tools come before what its user says.
absl::Status ReadMessage(const std::string& name, const Json& value, const Ordered& written,
                         MessagesRequest& to) {
  ChatMessage message;
  std::vector<ChatMessage>& all = to.messages;
  TREADLE_ASSIGN_OR_RETURN(message.role, ReadText(name + ".role", value.value("role", Json())));
  const bool assistant = message.role == "assistant", user = message.role == "user";
  if (!assistant && !user && message.role != "system") {
    return Expected(name + ".role", value["role"], R"("user", "assistant" or "system")");
  }
  const auto read_block = [&](const std::string& block, size_t i, const Json& type) {
    const Json& given = value["content"][i];
    if (assistant && type == "tool_use") {
      return ReadToolUse(block, given, written["content"][i], message);
    }
    if (assistant && type == "redacted_thinking") return absl::OkStatus();
    if (assistant && type == "thinking") {
      return ReadMembers(block, given,
                         {{"thinking",
                           [&](const auto& where, const Json& text) {
                             return Set(ReadText(where, text), message.reasoning);
                           }}},
                         kPassedOver);
    }
    if (user && type == "tool_result") {
      auto result = ReadToolResult(block, given, to);
      if (result.ok()) all.push_back(*std::move(result));
      return result.status();
    }
    return Expected(block + ".type", type,
                    assistant ? R"("text", "tool_use" or "thinking")"
                    : user    ? R"("text" or "tool_result": the model reads no other blocks)"
                              : R"("text")");
  };
  TREADLE_RETURN_IF_ERROR(
      ReadMembers(name, value,
                  {{"content",
                    [&](const auto& where, const Json& content) {
                      return ReadContent(where, content, message.content, read_block);
                    }},
                   {"role", [](const auto&, const Json&) { return absl::OkStatus(); }}}));
  if (value.value("content", Json()).is_null()) return InvalidArgument(name, ".content is missing");
  for (const ToolCall& call : message.tool_calls) to.called[call.id] = call.name;
  to.knows_tools |= !message.tool_calls.empty();
  if (!message.content && message.tool_calls.empty()) return absl::OkStatus();
  // Turns of one role that follow each other are one, as Anthropic's are.
  if (!all.empty() && all.back().role == message.role) {
    if (message.content) AddLine(*std::move(message.content), all.back().content);
    std::ranges::move(message.tool_calls, std::back_inserter(all.back().tool_calls));
  } else {
    all.push_back(std::move(message));
  }
  return absl::OkStatus();
}

absl::Status ReadMessages(const std::string& /*name*/, const Json& value, MessagesRequest& to) {
  if (!value.is_array()) return Expected("messages", value, "an array of messages");
  const Ordered written = Ordered::parse(MemberText(to.body, "messages"));
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string name = Str("messages[", i, "]");
    if (!value[i].is_object()) return Expected(name, value[i], "an object");
    TREADLE_RETURN_IF_ERROR(ReadMessage(name, value[i], written[i], to));
  }
  if (to.messages.empty()) return InvalidArgument("messages has no content, expected some");
  if (to.messages.back().role == "assistant") {
    return InvalidArgument("messages[", value.size() - 1, "].role is \"assistant\", expected the ",
                           "last message to be the user's: a begun answer is not gone on with");
  }
  return absl::OkStatus();
}

absl::Status ReadTools(const std::string& /*name*/, const Json& value, MessagesRequest& to) {
  constexpr std::string_view kWithoutEffect[] = {"allowed_callers", "cache_control",
                                                 "defer_loading", "eager_input_streaming",
                                                 "input_examples"};
  TREADLE_ASSIGN_OR_RETURN(FlatTools read, ReadFlatTools(value, MemberText(to.body, "tools"),
                                                         {.type = "custom",
                                                          .needs_type = false,
                                                          .schema = "input_schema",
                                                          .passed_over = kWithoutEffect}));
  to.tools = std::move(read.tools);
  to.tools_as_of_chat = std::move(read.as_of_chat);
  return absl::OkStatus();
}

absl::Status ReadToolChoice(const std::string& /*name*/, const Json& value, MessagesRequest& to) {
  using Mode = ToolChoice::Mode;
  constexpr std::pair<std::string_view, Mode> kTypes[] = {{"auto", Mode::kAuto},
                                                          {"any", Mode::kRequired},
                                                          {"tool", Mode::kRequired},
                                                          {"none", Mode::kNone}};
  ToolChoice& choice = to.tool_choice;
  choice.field = "tool_choice.name";
  std::string type;
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      "tool_choice", value,
      {{"type",
        [&](const auto& where, const Json& given) -> absl::Status {
          for (const auto& [name, mode] : kTypes) {
            if (given != name) continue;
            type = name;
            choice.mode = mode;
            return absl::OkStatus();
          }
          return Expected(where, given, R"("auto", "any", "tool" or "none")");
        }},
       {"name", [&](const auto& where,
                    const Json& text) { return Set(ReadText(where, text), choice.name); }},
       {"disable_parallel_tool_use", [&](const auto& where, const Json& given) -> absl::Status {
          TREADLE_ASSIGN_OR_RETURN(const bool disabled, ReadBool(where, given));
          to.reading.parallel = !disabled;
          return absl::OkStatus();
        }}}));
  TREADLE_RETURN_IF_ERROR(Required("tool_choice.type", type));
  if ((type == "tool") == choice.name.empty()) {
    return InvalidArgument("tool_choice.name is ", choice.name.empty() ? "missing" : "given",
                           ", expected it with the type \"tool\" alone");
  }
  return absl::OkStatus();
}

// `path`: of the form in the body.
absl::Status ReadForm(std::vector<std::string_view> path, const std::string& name,
                      const Json& value, MessagesRequest& to) {
  bool schema = false;
  TREADLE_RETURN_IF_ERROR(ReadMembers(name, value,
                                      {{"type",
                                        [](const auto& where, const Json& type) {
                                          return type == "json_schema"
                                                     ? absl::OkStatus()
                                                     : Expected(where, type, "\"json_schema\"");
                                        }},
                                       {"schema", [&](const auto& where, const Json& given) {
                                          schema = given.is_object();
                                          return schema ? absl::OkStatus()
                                                        : Expected(where, given, "an object");
                                        }}}));
  if (!schema) return InvalidArgument(name, ".schema is missing");
  to.form.constraint = Constraint{.kind = Constraint::Kind::kJsonSchema, .field = name};
  path.emplace_back("schema");
  to.form.schema_path = std::move(path);
  return absl::OkStatus();
}

absl::Status ReadOutputConfig(const std::string& name, const Json& value, MessagesRequest& to) {
  return ReadMembers(name, value,
                     {{"effort",
                       [&](const auto& where, const Json& effort) {
                         return ReadReasoningEffort(where, effort == "max" ? "xhigh" : effort, to);
                       }},
                      {"format", [&](const auto& where, const Json& format) {
                         return ReadForm({"output_config", "format"}, where, format, to);
                       }}});
}

// Templates that let their users choose have a switch. How much is thought is the model's affair.
absl::Status ReadThinking(const std::string& name, const Json& value, MessagesRequest& to) {
  return ReadMembers(
      name, value,
      {{"budget_tokens", [](const auto&, const Json&) { return absl::OkStatus(); }},
       {"display", [](const auto&, const Json&) { return absl::OkStatus(); }},
       {"type", [&](const auto& where, const Json& type) {
          constexpr const char* kTypes[] = {"adaptive", "between_tools", "disabled", "enabled"};
          if (std::ranges::count(kTypes, type) == 0) {
            return Expected(where, type, R"("enabled", "adaptive" or "disabled")");
          }
          const bool thinks = type != "disabled";
          to.template_arguments["enable_thinking"] = thinks;
          to.template_arguments["thinking"] = thinks;
          return absl::OkStatus();
        }}});
}

absl::Status ReadSystem(const std::string& name, const Json& value, MessagesRequest& to) {
  std::optional<std::string> text;
  TREADLE_RETURN_IF_ERROR(ReadTexts(name, value, text));
  to.system = text.value_or("");
  return absl::OkStatus();
}

absl::Status ReadStops(const std::string& name, const Json& value, MessagesRequest& to) {
  if (!value.is_array()) return Expected(name, value, "an array of strings");
  for (const Json& stop : value) {
    TREADLE_RETURN_IF_ERROR(Set(ReadText(Str(name, "[", &stop - &value[0], "]"), stop),
                                to.common.stopping.stop_strings.emplace_back()));
  }
  return absl::OkStatus();
}

constexpr BodyField<MessagesRequest> kFields[] = {
    {"max_tokens", Sets<ReadInt, &MessagesRequest::common, &GenerateRequest::stopping,
                        &GenerateRequest::Stopping::max_new_tokens>},
    {"messages", ReadMessages},
    {"model", IsRead<MessagesRequest>},
    {"output_config", ReadOutputConfig},
    {"output_format",
     [](const std::string& name, const Json& value, MessagesRequest& to) {
       return ReadForm({"output_format"}, name, value, to);
     }},
    {"stop_sequences", ReadStops},
    {"stream", Sets<ReadBool, &MessagesRequest::stream>},
    {"system", ReadSystem},
    {"thinking", ReadThinking},
    {"tool_choice", ReadToolChoice},
    {"tools", ReadTools},
};

using enum OpenAiField::Standing;
constexpr OpenAiField kOthers[] = {
    {"billing_policy", OpenAiIn::kChat, kIgnored},
    {"cache_control", OpenAiIn::kChat, kIgnored},
    {"compaction", OpenAiIn::kChat, kRefused},
    {"container", OpenAiIn::kChat, kRefused},
    {"context_management", OpenAiIn::kChat, kIgnored},
    {"diagnostics", OpenAiIn::kChat, kIgnored},
    {"fallback_credit_token", OpenAiIn::kChat, kIgnored},
    {"fallbacks", OpenAiIn::kChat, kIgnored},
    {"inference_geo", OpenAiIn::kChat, kIgnored},
    {"mcp_servers", OpenAiIn::kChat, kOnly, "[]"},
    {"metadata", OpenAiIn::kChat, kIgnored},
    {"service_tier", OpenAiIn::kChat, kIgnored},
    {"speed", OpenAiIn::kChat, kIgnored},
    {"thread", OpenAiIn::kChat, kRefused},
    {"user_profile_id", OpenAiIn::kChat, kIgnored},
    {"workspace_id", OpenAiIn::kChat, kIgnored},
};

}  // namespace

absl::StatusOr<OpenAiRequest> ReadMessagesRequest(std::string_view body, const ServedModel& model,
                                                  bool counting) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  MessagesRequest request;
  request.chat = true;
  request.body = body;
  request.common.sampling.parameters = model.sampling();
  request.common.adapter = AdapterNamed(object, model);
  TREADLE_RETURN_IF_ERROR(ReadFields<MessagesRequest>(object, kFields, kOthers, request));
  GenerateRequest::Stopping& stopping = request.common.stopping;
  if (!counting && !stopping.max_new_tokens) return InvalidArgument("max_tokens is missing");
  if (stopping.max_new_tokens.value_or(1) < 1) {
    return InvalidArgument("max_tokens is ", *stopping.max_new_tokens, ", expected at least 1");
  }
  stopping.without_limit = true;  // clients ask for more than most contexts have
  if (!request.messages.empty()) {
    if (!request.system.empty()) {
      request.messages.insert(request.messages.begin(),
                              {.role = "system", .content = std::move(request.system)});
    }
    request.prompts.emplace_back(std::move(request.messages));
  }
  TREADLE_RETURN_IF_ERROR(ConcludeBody(body, model, request));
  return OpenAiRequest(std::move(request));
}

std::vector<OpenAiField> MessagesFields() { return ListFields<MessagesRequest>(kFields, kOthers); }

}  // namespace treadle
