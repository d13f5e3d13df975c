#include "server/responses/responses_request.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/json_file.h"
#include "base/number.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/body_fields.h"
#include "server/openai/json/json_text.h"
#include "server/openai/tools/tool_request.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

struct Asked : ResponsesRequest {
  std::string_view body = {};
  const FindResponse* find = nullptr;
  std::optional<std::string> instructions = {};
  std::vector<ChatMessage> earlier = {};  // the conversation of the previous response
  std::vector<ChatMessage> input = {};
  std::string thought = {};  // before the next message
};

// Members that come back with what a server told, or steer another server's cache.
constexpr std::string_view kPassedOver[] = {
    "annotations", "async",  "caller",           "id",    "logprobs",
    "namespace",   "parsed", "parsed_arguments", "phase", "prompt_cache_breakpoint",
    "status",      "type"};

absl::Status PassOverMember(const std::string&, const Json&) { return absl::OkStatus(); }

// A text, or an array of parts of text, each of which becomes a line.
absl::StatusOr<std::string> ReadContent(const std::string& name, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return Expected(name, value, "a string or an array of parts");
  std::string text;
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string part = Str(name, "[", i, "]");
    if (!value[i].is_object()) return Expected(part, value[i], "an object");
    const Json type = value[i].value("type", Json());
    if (type != "input_text" && type != "output_text" && type != "refusal" &&
        type != "reasoning_text") {
      return Expected(part + ".type", type, R"("input_text": the model reads no other parts)");
    }
    std::string line;
    const std::string_view member = type == "refusal" ? "refusal" : "text";
    const auto read = [&](const auto& where, const Json& given) {
      return Set(ReadText(where, given), line);
    };
    TREADLE_RETURN_IF_ERROR(ReadMembers(part, value[i], {{member, read}}, kPassedOver));
    text += (i > 0 ? "\n" : "") + line;
  }
  return text;
}

absl::Status ReadMessage(const std::string& name, const Json& item, Asked& to) {
  ChatMessage message;
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, item,
      {{"role",
        [&](const auto& where, const Json& role) {
          constexpr const char* kRoles[] = {"user", "assistant", "system", "developer"};
          if (std::ranges::count(kRoles, role) == 0) {
            return Expected(where, role, R"("user", "assistant", "system" or "developer")");
          }
          message.role = role == "developer" ? "system" : role.get<std::string>();
          return absl::OkStatus();
        }},
       {"content",
        [&](const auto& where, const Json& content) {
          return Set(ReadContent(where, content), message.content);
        }}},
      kPassedOver));
  TREADLE_RETURN_IF_ERROR(Required(name + ".role", message.role));
  if (!message.content) return InvalidArgument(name, ".content is missing");
  std::string thought = std::exchange(to.thought, std::string());
  if (message.role == "assistant") message.reasoning = std::move(thought);
  to.input.push_back(std::move(message));
  return absl::OkStatus();
}

// A call is part of the assistant's message before it, if there is one.
absl::Status ReadCall(const std::string& name, const Json& item, Asked& to) {
  ToolCall call;
  const auto text = [](std::string& member) {
    return [&member](const auto& where, const Json& value) {
      return Set(ReadText(where, value), member);
    };
  };
  TREADLE_RETURN_IF_ERROR(
      ReadMembers(name, item,
                  {{"call_id", text(call.id)},
                   {"name", text(call.name)},
                   {"arguments",
                    [&](const auto& where, const Json& value) -> absl::Status {
                      TREADLE_ASSIGN_OR_RETURN(call.arguments, ReadText(where, value));
                      if (call.arguments.empty()) call.arguments = "{}";
                      return ParseJsonObject(call.arguments, where, kMaxJsonValues).status();
                    }}},
                  kPassedOver));
  TREADLE_RETURN_IF_ERROR(Required(name + ".call_id", call.id));
  TREADLE_RETURN_IF_ERROR(Required(name + ".name", call.name));
  TREADLE_RETURN_IF_ERROR(Required(name + ".arguments", call.arguments));
  if (to.input.empty() || to.input.back().role != "assistant") {
    to.input.push_back({.role = "assistant"});
    to.input.back().reasoning = std::exchange(to.thought, std::string());
  }
  to.input.back().tool_calls.push_back(std::move(call));
  return absl::OkStatus();
}

absl::Status ReadCallOutput(const std::string& name, const Json& item, Asked& to) {
  ChatMessage result{.role = "tool"};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, item,
      {{"call_id", [&](const auto& where,
                       const Json& id) { return Set(ReadText(where, id), result.tool_call_id); }},
       {"name", PassOverMember},
       {"output",
        [&](const auto& where, const Json& output) {
          return Set(ReadContent(where, output), result.content);
        }}},
      kPassedOver));
  TREADLE_RETURN_IF_ERROR(Required(name + ".call_id", result.tool_call_id));
  if (!result.content) return InvalidArgument(name, ".output is missing");
  to.input.push_back(std::move(result));
  return absl::OkStatus();
}

// Joins what a model thought to the assistant's message that follows.
absl::Status ReadThought(const std::string& name, const Json& item, Asked& to) {
  return ReadMembers(name, item,
                     {{"summary", PassOverMember},
                      {"encrypted_content", PassOverMember},
                      {"content",
                       [&](const auto& where, const Json& content) -> absl::Status {
                         TREADLE_ASSIGN_OR_RETURN(const std::string text,
                                                  ReadContent(where, content));
                         to.thought += text;
                         return absl::OkStatus();
                       }}},
                     kPassedOver);
}

struct Item {
  std::string_view type;
  absl::Status (*read)(const std::string& name, const Json& item, Asked& to);
};
constexpr Item kItems[] = {
    {"message", ReadMessage},
    {"function_call", ReadCall},
    {"function_call_output", ReadCallOutput},
    {"reasoning", ReadThought},
};

absl::Status ReadInput(const std::string& /*name*/, const Json& value, Asked& to) {
  if (value.is_string()) {
    to.input.push_back({.role = "user", .content = value.get<std::string>()});
    return absl::OkStatus();
  }
  if (!value.is_array()) return Expected("input", value, "a string or an array of items");
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string name = Str("input[", i, "]");
    if (!value[i].is_object()) return Expected(name, value[i], "an object");
    const Json type = value[i].value("type", Json("message"));
    const auto* const item =
        std::ranges::find_if(kItems, [&](const Item& known) { return type == known.type; });
    if (item == std::end(kItems)) {
      return Expected(name + ".type", type,
                      R"("message", "function_call", "function_call_output" or "reasoning")");
    }
    TREADLE_RETURN_IF_ERROR(item->read(name, value[i], to));
  }
  return absl::OkStatus();
}

absl::Status ReadPrevious(const std::string& name, const Json& value, Asked& to) {
  TREADLE_ASSIGN_OR_RETURN(const std::string id, ReadText(name, value));
  const auto kept = (*to.find)(id);
  if (kept == nullptr) {
    return Expected(name, value, "the id of a response that is kept");
  }
  to.earlier = kept->messages;
  return absl::OkStatus();
}

absl::Status ReadTools(const std::string& /*name*/, const Json& value, Asked& to) {
  constexpr std::string_view kWithoutEffect[] = {"allowed_callers", "async", "defer_loading",
                                                 "output_schema"};
  TREADLE_ASSIGN_OR_RETURN(FlatTools read, ReadFlatTools(value, MemberText(to.body, "tools"),
                                                         {.type = "function",
                                                          .needs_type = true,
                                                          .schema = "parameters",
                                                          .passed_over = kWithoutEffect}));
  to.tools = std::move(read.tools);
  to.tools_as_of_chat = std::move(read.as_of_chat);
  return absl::OkStatus();
}

absl::Status ReadToolChoice(const std::string& name, const Json& value, Asked& to) {
  if (value.is_string()) return Set(treadle::ReadToolChoice(name, value), to.tool_choice);
  to.tool_choice = {.mode = ToolChoice::Mode::kRequired, .field = "tool_choice.name"};
  TREADLE_RETURN_IF_ERROR(ReadMembers("tool_choice", value,
                                      {{"type",
                                        [](const auto& where, const Json& type) {
                                          return type == "function"
                                                     ? absl::OkStatus()
                                                     : Expected(where, type, "\"function\"");
                                        }},
                                       {"name", [&](const auto& where, const Json& name) {
                                          return Set(ReadText(where, name), to.tool_choice.name);
                                        }}}));
  return Required("tool_choice.name", to.tool_choice.name);
}

absl::Status ReadFormat(const std::string& name, const Json& value, Asked& to) {
  if (!value.is_object()) return Expected(name, value, "an object");
  const Json type = value.value("type", Json());
  const bool schema = type == "json_schema";
  if (!schema && type != "text" && type != "json_object") {
    return Expected(name + ".type", type, R"("text", "json_object" or "json_schema")");
  }
  std::vector<Member> members = {{"type", PassOverMember}};
  if (schema) {
    for (const char* member : {"name", "strict", "description"}) {
      members.push_back({member, PassOverMember});  // every schema is enforced
    }
    members.push_back({"schema", [&](const auto& where, const Json& given) {
                         to.form.schema_path = {"text", "format", "schema"};
                         return given.is_object() ? absl::OkStatus()
                                                  : Expected(where, given, "an object");
                       }});
  }
  TREADLE_RETURN_IF_ERROR(ReadMembers(name, value, members));
  if (schema && to.form.schema_path.empty()) return InvalidArgument(name, ".schema is missing");
  if (type == "text") return absl::OkStatus();
  to.form.constraint =
      Constraint{.kind = schema ? Constraint::Kind::kJsonSchema : Constraint::Kind::kJsonObject,
                 .field = name};
  return absl::OkStatus();
}

absl::Status ReadTextConfig(const std::string& name, const Json& value, Asked& to) {
  return ReadMembers(
      name, value,
      {{"format",
        [&](const auto& where, const Json& format) { return ReadFormat(where, format, to); }},
       {"verbosity", [](const auto& where, const Json& given) {
          return given == "medium" ? absl::OkStatus() : Expected(where, given, "\"medium\"");
        }}});
}

absl::Status ReadReasoning(const std::string& name, const Json& value, Asked& to) {
  return ReadMembers(
      name, value,
      {{"effort", [&](const auto& where,
                      const Json& effort) { return ReadReasoningEffort(where, effort, to); }},
       {"summary", PassOverMember},  // all that was thought is told
       {"generate_summary", PassOverMember}});
}

constexpr BodyField<Asked> kFields[] = {
    {"input", ReadInput},
    {"instructions", Sets<ReadText, &Asked::instructions>},
    {"max_output_tokens", Sets<ReadInt, &Asked::common, &GenerateRequest::stopping,
                               &GenerateRequest::Stopping::max_new_tokens>},
    {"metadata",
     [](const std::string& name, const Json& value, Asked&) {
       return value.is_object() ? absl::OkStatus() : Expected(name, value, "an object");
     }},
    {"model", IsRead<Asked>},
    {"parallel_tool_calls", Sets<ReadBool, &Asked::reading, &AnswerReader::Options::parallel>},
    {"previous_response_id", ReadPrevious},
    {"reasoning", ReadReasoning},
    {"store", Sets<ReadBool, &Asked::store>},
    {"stream", Sets<ReadBool, &Asked::stream>},
    {"text", ReadTextConfig},
    {"tool_choice", ReadToolChoice},
    {"tools", ReadTools},
};

using enum OpenAiField::Standing;
constexpr OpenAiField kOthers[] = {
    {"access_programs", OpenAiIn::kChat, kRefused},
    {"background", OpenAiIn::kChat, kOnly, "false"},
    {"background_options", OpenAiIn::kChat, kIgnored},
    {"context_management", OpenAiIn::kChat, kIgnored},
    {"conversation", OpenAiIn::kChat, kRefused},
    {"image", OpenAiIn::kChat, kIgnored},
    {"include", OpenAiIn::kChat, kOnly, R"([] or ["reasoning.encrypted_content"])"},
    {"max_tool_calls", OpenAiIn::kChat, kIgnored},
    {"moderation", OpenAiIn::kChat, kRefused},
    {"prompt", OpenAiIn::kChat, kRefused},
    {"prompt_cache_key", OpenAiIn::kChat, kIgnored},
    {"prompt_cache_options", OpenAiIn::kChat, kIgnored},
    {"prompt_cache_retention", OpenAiIn::kChat, kIgnored},
    {"safety_identifier", OpenAiIn::kChat, kIgnored},
    {"service_tier", OpenAiIn::kChat, kIgnored},
    {"stream_options", OpenAiIn::kChat, kIgnored},
    {"top_logprobs", OpenAiIn::kChat, kOnly, "0"},
    {"truncation", OpenAiIn::kChat, kOnly, R"("disabled")"},
    {"user", OpenAiIn::kChat, kIgnored},
};

// Members of an answer that say what was asked, with what they are if it was not.
constexpr std::pair<std::string_view, std::string_view> kEchoed[] = {
    {"instructions", "null"},
    {"max_output_tokens", "null"},
    {"metadata", "{}"},
    {"parallel_tool_calls", "true"},
    {"previous_response_id", "null"},
    {"reasoning", R"({"effort":null,"summary":null})"},
    {"store", "true"},
    {"text", R"({"format":{"type":"text"}})"},
    {"tool_choice", R"("auto")"},
    {"tools", "[]"},
    {"truncation", R"("disabled")"},
    {"user", "null"},
};

std::string EchoOf(std::string_view body, const SamplingParameters& sampling) {
  std::string echo = Str(R"("temperature":)", JsonLogprob(sampling.temperature), R"(,"top_p":)",
                         JsonLogprob(sampling.top_p), R"(,"background":false,"top_logprobs":0)");
  for (const auto& [name, absent] : kEchoed) {
    const std::string_view asked = MemberText(body, name);
    echo += Str(",\"", name, "\":", asked.empty() || asked == "null" ? absent : asked);
  }
  return echo;
}

// Results of tools have their tools' names, wherever in the conversation those were called.
absl::Status NameResults(size_t before, std::vector<ChatMessage>& messages, bool& knows_tools) {
  std::map<std::string, std::string> called;
  for (size_t i = 0; i < messages.size(); ++i) {
    for (const ToolCall& call : messages[i].tool_calls) called[call.id] = call.name;
    if (messages[i].role != "tool") continue;
    const auto found = called.find(messages[i].tool_call_id);
    if (found != called.end()) {
      messages[i].name = found->second;
    } else if (i >= before) {
      return InvalidArgument("input has an output for call_id ",
                             Json(Cut(messages[i].tool_call_id, kShown)).dump(),
                             ", expected one of a function_call before it");
    }
  }
  knows_tools = !called.empty();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ResponsesRequest> ReadResponsesRequest(std::string_view body,
                                                      const ServedModel& model,
                                                      const FindResponse& find) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  Asked request;
  request.chat = true;
  request.max_tokens = "max_output_tokens";
  request.body = body;
  request.find = &find;
  request.common.sampling.parameters = model.sampling();
  request.common.adapter = AdapterNamed(object, model);
  TREADLE_RETURN_IF_ERROR(ReadFields<Asked>(object, kFields, kOthers, request));
  if (request.input.empty()) return InvalidArgument("input is missing");
  request.history = std::move(request.earlier);
  const size_t before = request.history.size();
  std::ranges::move(request.input, std::back_inserter(request.history));
  TREADLE_RETURN_IF_ERROR(NameResults(before, request.history, request.knows_tools));
  std::vector<ChatMessage> messages = request.history;
  if (request.instructions) {
    messages.insert(messages.begin(), {.role = "system", .content = *request.instructions});
  }
  request.prompts.emplace_back(std::move(messages));
  TREADLE_RETURN_IF_ERROR(ConcludeBody(body, model, request));
  request.echo = EchoOf(body, request.common.sampling.parameters);
  return ResponsesRequest(std::move(request));
}

std::vector<OpenAiField> ResponsesFields() { return ListFields<Asked>(kFields, kOthers); }

}  // namespace treadle
