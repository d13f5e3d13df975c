#include "server/openai/openai_request.h"

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/json_file.h"
#include "base/number.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/json_fields.h"
#include "server/openai/json_text.h"
#include "server/openai/tool_request.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// -- prompts --------------------------------------------------------------------------------------

// One text, one list of ids, or an array of either.
absl::Status ReadPrompts(const std::string& field, const Json& value, OpenAiRequest& to) {
  const auto add = [&](const std::string& name, const Json& prompt) -> absl::Status {
    if (prompt.is_string()) {
      to.prompts.emplace_back(prompt.get<std::string>());
      return absl::OkStatus();
    }
    TREADLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids, ReadIds(name, prompt));
    to.prompts.emplace_back(std::move(ids));
    return absl::OkStatus();
  };
  if (value.is_array() && value.empty()) {
    return Expected(field, value, "a string, token ids, or an array of either");
  }
  if (!value.is_array() || value[0].is_number()) return add(field, value);
  const size_t most = to.common.embedding ? kMaxInputs : kMaxPrompts;
  if (value.size() > most) {
    return InvalidArgument(field, " has ", value.size(), " entries, expected at most ", most);
  }
  for (size_t i = 0; i < value.size(); ++i) {
    TREADLE_RETURN_IF_ERROR(add(Str(field, "[", i, "]"), value[i]));
  }
  return absl::OkStatus();
}

// A string, or an array of parts of text, each of which becomes a line.
absl::StatusOr<std::string> ReadContent(const std::string& name, const Json& value) {
  if (!value.is_array()) return ReadText(name, value);
  std::string text;
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string part = Str(name, "[", i, "]");
    if (!value[i].is_object()) return Expected(part, value[i], "an object");
    const Json type = value[i].value("type", Json());
    if (type != "text") return Expected(part + ".type", type, "\"text\"");
    if (value[i].size() != 2) return Expected(part, value[i], "type and text alone");
    TREADLE_ASSIGN_OR_RETURN(const std::string read,
                             ReadText(part + ".text", value[i].value("text", Json())));
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
    if (key == "role" || field.is_null()) continue;
    if (key == "content") {
      TREADLE_ASSIGN_OR_RETURN(message.content, ReadContent(where, field));
    } else if (key == "tool_calls" && assistant) {
      TREADLE_ASSIGN_OR_RETURN(message.tool_calls, ReadToolCalls(where, field));
    } else if (key == "tool_call_id" && tool) {
      TREADLE_ASSIGN_OR_RETURN(message.tool_call_id, ReadText(where, field));
    } else if (key == "name" && tool) {
      TREADLE_ASSIGN_OR_RETURN(message.name, ReadText(where, field));
    } else {
      return InvalidArgument(where, " is not supported in a message of this role");
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
  // What newer clients call the instructions that templates know as the system's.
  if (message.role == "developer") message.role = "system";
  return message;
}

absl::Status ReadMessages(const Json& value, OpenAiRequest& to) {
  if (!value.is_array()) return Expected("messages", value, "an array of messages");
  std::vector<ChatMessage> messages;
  std::map<std::string, std::string> tools;
  for (size_t i = 0; i < value.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(messages.emplace_back(),
                             ReadMessage(Str("messages[", i, "]"), value[i], tools));
  }
  to.knows_tools |= !tools.empty();
  to.prompts.emplace_back(std::move(messages));
  return absl::OkStatus();
}

// -- fields ---------------------------------------------------------------------------------------

absl::Status ReadSeed(const Json& value, OpenAiRequest& to) {
  if (!value.is_number_integer()) return Expected("seed", value, "a whole number");
  to.common.sampling.seed = value.get<uint64_t>();  // of 64 bits, negative ones too
  return absl::OkStatus();
}

absl::Status ReadStop(const Json& value, OpenAiRequest& to) {
  std::vector<std::string>& stops = to.common.stopping.stop_strings;
  if (!value.is_array()) {
    TREADLE_ASSIGN_OR_RETURN(stops.emplace_back(), ReadText("stop", value));
    return absl::OkStatus();
  }
  for (const Json& stop : value) {
    TREADLE_ASSIGN_OR_RETURN(stops.emplace_back(), ReadText(Str("stop[", stops.size(), "]"), stop));
  }
  return absl::OkStatus();
}

absl::Status ReadLogitBias(const Json& value, OpenAiRequest& to) {
  if (!value.is_object()) return Expected("logit_bias", value, "an object from ids to numbers");
  for (const auto& [key, bias] : value.items()) {
    const std::optional<int32_t> token = NumberIn<int32_t>(key);
    if (!token || !bias.is_number()) {
      return Expected(Str("logit_bias['", Cut(key, kShown), "']"), bias,
                      "a number, by a token's id");
    }
    to.common.sampling.parameters.logit_bias.push_back({*token, bias.get<float>()});
  }
  return absl::OkStatus();
}

absl::Status ReadStreamOptions(const Json& value, OpenAiRequest& to) {
  if (!value.is_object()) return Expected("stream_options", value, "an object");
  for (const auto& [key, option] : value.items()) {
    bool* const field = key == "include_usage"            ? &to.include_usage
                        : key == "continuous_usage_stats" ? &to.usage_in_chunks
                                                          : nullptr;
    if (field == nullptr) return InvalidArgument("stream_options.", key, " is not supported");
    TREADLE_RETURN_IF_ERROR(Set(ReadBool("stream_options." + key, option), *field));
  }
  return absl::OkStatus();
}

absl::Status ReadMaxTokens(std::string_view name, const Json& value, OpenAiRequest& to) {
  std::optional<int32_t>& most = to.common.stopping.max_new_tokens;
  const std::optional<int32_t> other = most;
  TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), most));
  to.max_tokens = name;
  if (!other || other == most) return absl::OkStatus();
  return InvalidArgument(name, " is ", *most, ", but max_completion_tokens is ", *other,
                         ", expected one of them");
}

// Two shapes: a number in completions; a flag and a number in chats.
absl::Status ReadLogprobs(const Json& value, OpenAiRequest& to) {
  std::optional<int32_t>& most = to.common.logprobs;
  if (!to.chat) return Set(ReadInt("logprobs", value), most);
  TREADLE_ASSIGN_OR_RETURN(const bool wanted, ReadBool("logprobs", value));
  if (wanted) most = 0;
  return absl::OkStatus();
}
absl::Status ReadTopLogprobs(const Json& value, OpenAiRequest& to) {
  if (to.common.logprobs) return Set(ReadInt("top_logprobs", value), to.common.logprobs);
  return InvalidArgument("top_logprobs is given, expected logprobs to be true then");
}

// A schema is taken from the body itself (see Conclude), and `to` is told where it stands there.
absl::Status ReadSchema(std::vector<std::string_view> path, OpenAiRequest& to) {
  to.common.constraint->kind = Constraint::Kind::kJsonSchema;
  to.schema_path = std::move(path);
  return absl::OkStatus();
}

absl::Status BeginConstraint(const char* field, OpenAiRequest& to) {
  if (!to.common.constraint) {
    to.common.constraint.emplace().field = field;
    return absl::OkStatus();
  }
  return InvalidArgument(field, " is given, expected not together with ",
                         to.common.constraint->field);
}

absl::Status ReadResponseFormat(const Json& value, OpenAiRequest& to) {
  constexpr const char* kField = "response_format";
  if (!value.is_object()) return Expected(kField, value, "an object");
  const Json type = value.value("type", Json());
  const bool schema = type == "json_schema";
  for (const auto& [key, part] : value.items()) {
    if (key == "type" || (schema && key == "json_schema") || part.is_null()) continue;
    return InvalidArgument(kField, ".", Cut(Printable(key), kShown), " is not supported");
  }
  if (type == "text") return absl::OkStatus();
  if (!schema && type != "json_object") {
    return Expected("response_format.type", type, "\"text\", \"json_object\" or \"json_schema\"");
  }
  TREADLE_RETURN_IF_ERROR(BeginConstraint(kField, to));
  if (!schema) return absl::OkStatus();
  const Json described = value.value("json_schema", Json());
  if (!described.is_object() || !described.contains("schema")) {
    return Expected("response_format.json_schema", described, "an object with a schema");
  }
  for (const auto& [key, part] : described.items()) {
    // Every schema is enforced, strict or not.
    if (key == "schema" || key == "name" || key == "strict" || key == "description") continue;
    return InvalidArgument("response_format.json_schema.", Cut(Printable(key), kShown),
                           " is not supported");
  }
  return ReadSchema({kField, "json_schema", "schema"}, to);
}

// As vLLM's clients say it: exactly one of json, json_object, regex, choice and grammar.
absl::Status ReadStructuredOutputs(const Json& value, OpenAiRequest& to) {
  using Kind = Constraint::Kind;
  constexpr const char* kField = "structured_outputs";
  if (!value.is_object()) return Expected(kField, value, "an object");
  for (const auto& [key, part] : value.items()) {
    const std::string name = Str(kField, ".", Cut(Printable(key), kShown));
    if (part.is_null() || part == false) continue;
    TREADLE_RETURN_IF_ERROR(BeginConstraint(kField, to));
    Constraint& constraint = *to.common.constraint;
    if (key == "json" && part.is_object()) {
      TREADLE_RETURN_IF_ERROR(ReadSchema({kField, "json"}, to));
    } else if (key == "json_object") {
      TREADLE_RETURN_IF_ERROR(ReadBool(name, part).status());
    } else if (key == "json" || key == "regex" || key == "grammar") {
      constraint.kind = key == "json"    ? Kind::kJsonSchema
                        : key == "regex" ? Kind::kRegex
                                         : Kind::kGrammar;
      TREADLE_ASSIGN_OR_RETURN(constraint.text, ReadText(name, part));
    } else if (key == "choice" && part.is_array()) {
      constraint.kind = Kind::kChoice;
      for (const Json& choice : part) {
        TREADLE_ASSIGN_OR_RETURN(constraint.choices.emplace_back(), ReadText(name, choice));
      }
    } else {
      return InvalidArgument(name, " is not supported");
    }
  }
  return absl::OkStatus();
}

enum In : uint8_t { kCompletions = 1, kChat = 2, kBoth = 3 };

struct Field {
  const char* name;
  In in;
  absl::Status (*read)(const Json& value, OpenAiRequest& to);  // null: without effect on the answer
};

// All but kSamplingFields. In the order in which JSON objects are kept, by name.
constexpr Field kFields[] = {
    {"add_special_tokens", kCompletions,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("add_special_tokens", value), to.common.add_special_tokens);
     }},
    {"cache_salt", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadText("cache_salt", value), to.common.cache_salt);
     }},
    {"echo", kCompletions,
     [](const Json& value, OpenAiRequest& to) { return Set(ReadBool("echo", value), to.echo); }},
    {"ignore_eos", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("ignore_eos", value), to.common.stopping.ignore_eos);
     }},
    {"logit_bias", kBoth, ReadLogitBias},
    {"logprobs", kBoth, ReadLogprobs},
    {"max_completion_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return ReadMaxTokens("max_completion_tokens", value, to);
     }},
    {"max_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) { return ReadMaxTokens("max_tokens", value, to); }},
    {"messages", kChat, ReadMessages},
    {"metadata", kBoth, nullptr},
    {"min_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("min_tokens", value), to.common.stopping.min_new_tokens);
     }},
    {"model", kBoth, nullptr},  // was compared before
    {"n", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadInt("n", value), to.common.sampling.num_candidates);
     }},
    {"parallel_tool_calls", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("parallel_tool_calls", value), to.parallel_tool_calls);
     }},
    {"prompt", kCompletions,
     [](const Json& value, OpenAiRequest& to) { return ReadPrompts("prompt", value, to); }},
    {"prompt_cache_key", kBoth, nullptr},
    {"prompt_logprobs", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       to.prompt_logprobs = true;
       return Set(ReadInt("prompt_logprobs", value), to.common.prompt_logprobs);
     }},
    {"response_format", kBoth, ReadResponseFormat},
    {"return_token_ids", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("return_token_ids", value), to.token_ids);
     }},
    {"safety_identifier", kBoth, nullptr},
    {"seed", kBoth, ReadSeed},
    {"service_tier", kBoth, nullptr},
    {"skip_special_tokens", kBoth,
     [](const Json& value, OpenAiRequest& to) -> absl::Status {
       TREADLE_ASSIGN_OR_RETURN(const bool skip, ReadBool("skip_special_tokens", value));
       to.common.special_tokens = !skip;
       return absl::OkStatus();
     }},
    {"stop", kBoth, ReadStop},
    {"stop_token_ids", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadIds("stop_token_ids", value), to.common.stopping.stop_token_ids);
     }},
    {"store", kBoth, nullptr},
    {"stream", kBoth,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadBool("stream", value), to.stream);
     }},
    {"stream_options", kBoth, ReadStreamOptions},
    {"structured_outputs", kBoth, ReadStructuredOutputs},
    {"tool_choice", kChat,
     [](const Json& value, OpenAiRequest& to) {
       return Set(ReadToolChoice(value), to.tool_choice);
     }},
    {"tools", kChat,
     [](const Json& value, OpenAiRequest& to) { return Set(ReadTools(value), to.tools); }},
    {"top_logprobs", kChat, ReadTopLogprobs},
    {"user", kBoth, nullptr},
};

absl::Status ReadSampling(const SamplingField& field, const Json& value, OpenAiRequest& to) {
  if (const auto* real = std::get_if<float SamplingParameters::*>(&field.member)) {
    if (!value.is_number()) return Expected(field.name, value, "a number");
    to.common.sampling.parameters.*(*real) = value.get<float>();
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(const int32_t top_k, ReadInt(field.name, value));
  if (top_k != 0 && top_k != -1) to.common.sampling.top_k = top_k;  // which mean: off
  return absl::OkStatus();
}

absl::Status ReadField(const std::string& name, const Json& value, OpenAiRequest& to) {
  for (const SamplingField& field : kSamplingFields) {
    if (field.name == name) return ReadSampling(field, value, to);
  }
  for (const Field& field : kFields) {
    if (field.name != name || (field.in & (to.chat ? kChat : kCompletions)) == 0) continue;
    return field.read == nullptr ? absl::OkStatus() : field.read(value, to);
  }
  return InvalidArgument(Cut(Printable(name), kShown), " is not supported");
}

// What holds between several fields.
absl::Status Conclude(std::string_view body, OpenAiRequest& to) {
  if (to.prompts.empty()) return InvalidArgument(to.chat ? "messages" : "prompt", " is missing");
  if (!to.stream && (to.include_usage || to.usage_in_chunks)) {
    return InvalidArgument("stream_options is given, expected stream to be true then");
  }
  if (to.stream && to.prompt_logprobs) {
    return InvalidArgument("prompt_logprobs is given, expected stream to be false then");
  }
  if (!to.schema_path.empty()) {
    for (const std::string_view name : to.schema_path) body = MemberText(body, name);
    to.common.constraint->text = body;
  }
  if (to.echo && to.common.logprobs) {
    std::optional<int32_t>& most = to.common.prompt_logprobs;
    most = std::max(most.value_or(0), *to.common.logprobs);
  }
  if (to.echo && to.common.stopping.max_new_tokens == 0) {
    to.prompt_only = true;
    to.common.stopping.max_new_tokens = 1;
  }
  return absl::OkStatus();
}

// `body`: what the request was read from. Tools that may not be called are not told to the model.
absl::Status ConcludeTools(std::string_view body, const ServedModel& model, OpenAiRequest& to) {
  const bool demanded = to.tool_choice.mode == ToolChoice::Mode::kRequired;
  if (demanded && to.tools.empty()) {
    return InvalidArgument("tool_choice is a demand for a call, expected tools then");
  }
  const bool offered = !to.tools.empty() && to.tool_choice.mode != ToolChoice::Mode::kNone;
  if (!offered && !to.knows_tools) return absl::OkStatus();
  const ToolFormat* const format =
      model.chat_template ? FindToolFormat(model.chat_template->source()) : nullptr;
  if (format == nullptr) {
    return InvalidArgument(offered ? "tools is given" : "messages has calls of tools",
                           ", but the model's chat template has no form of calls that is known (",
                           ToolFormatNames(), "), expected none");
  }
  if (!offered) return absl::OkStatus();
  to.tool_format = format;
  to.common.tools = MemberText(body, "tools");
  // Some models mark calls with special tokens.
  to.common.special_tokens = true;
  return ConstrainCalls(to.common.tools, to.tools, to.tool_choice, to.parallel_tool_calls, *format,
                        to.common.constraint);
}

absl::StatusOr<Json> ReadBody(std::string_view body, const ServedModel& model) {
  if (const size_t bad = FindInvalidUtf8(body); bad != std::string_view::npos) {
    return InvalidArgument("the body is not valid UTF-8 at byte ", bad);
  }
  TREADLE_ASSIGN_OR_RETURN(Json object, ParseJsonObject(body, "the body", kMaxJsonValues));
  const Json name = object.value("model", Json());
  if (name.is_null() || name == model.name) return object;
  if (!name.is_string()) return Expected("model", name, "a string");
  return NotFound("the model ", Cut(name.dump(), kShown), " does not exist, expected ",
                  Json(model.name).dump());
}

}  // namespace

absl::StatusOr<OpenAiRequest> ReadOpenAiRequest(std::string_view body, bool chat,
                                                const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  OpenAiRequest request{.chat = chat};
  for (const auto& [name, value] : object.items()) {
    if (!value.is_null()) TREADLE_RETURN_IF_ERROR(ReadField(name, value, request));
  }
  TREADLE_RETURN_IF_ERROR(Conclude(body, request));
  TREADLE_RETURN_IF_ERROR(ConcludeTools(body, model, request));
  return request;
}

bool SameRequest(std::string_view body, std::string_view other) {
  if (body == other) return true;
  const auto json = ParseJsonObject(body, ""), other_json = ParseJsonObject(other, "");
  return json.ok() && other_json.ok() && *json == *other_json;
}

absl::StatusOr<OpenAiRequest> ReadEmbeddings(std::string_view body, const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  OpenAiRequest request{.common = {.embedding = true}};
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "model" || name == "user") continue;
    if (name == "input") {
      TREADLE_RETURN_IF_ERROR(ReadPrompts(name, value, request));
    } else if (name == "encoding_format") {
      request.base64 = value == "base64";
      if (!request.base64 && value != "float")
        return Expected(name, value, R"("float" or "base64")");
    } else if (name == "add_special_tokens") {
      TREADLE_RETURN_IF_ERROR(Set(ReadBool(name, value), request.common.add_special_tokens));
    } else {
      return InvalidArgument(Cut(Printable(name), kShown), " is not supported");
    }
  }
  if (request.prompts.empty()) return InvalidArgument("input is missing");
  return request;
}

absl::StatusOr<TokenizeQuestion> ReadTokenize(std::string_view body, const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  TokenizeQuestion question;
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "model" || name == "prompt") continue;
    if (name != "add_special_tokens") return InvalidArgument(name, " is not supported");
    TREADLE_RETURN_IF_ERROR(Set(ReadBool(name, value), question.add_special));
  }
  TREADLE_RETURN_IF_ERROR(Set(ReadText("prompt", object.value("prompt", Json())), question.text));
  return question;
}

absl::StatusOr<std::vector<int32_t>> ReadDetokenize(std::string_view body,
                                                    const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == "model" || name == "tokens") continue;
    return InvalidArgument(name, " is not supported");
  }
  return ReadIds("tokens", object.value("tokens", Json()));
}

}  // namespace treadle
