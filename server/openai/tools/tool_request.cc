#include "server/openai/tools/tool_request.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/json_file.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/json/json_fields.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// Members that SDKs send back with a call, and templates do not have: where it stood in a stream,
// and its arguments once more.
constexpr std::string_view kPassedOver[] = {"index", "parsed_arguments"};

absl::Status IsFunction(const std::string& name, const Json& value) {
  return value == "function" ? absl::OkStatus() : Expected(name, value, "\"function\"");
}

absl::Status ReadSchema(const std::string& name, const Json& value, Tool& to) {
  if (!value.is_object()) return Expected(name, value, "an object");
  const Json properties = value.value("properties", Json());
  for (const auto& [key, schema] : properties.items()) {
    if (schema.is_object() && schema.value("type", Json()) == "string") to.texts.insert(key);
  }
  return absl::OkStatus();
}

absl::StatusOr<Tool> ReadTool(const std::string& name, const Json& tool) {
  Tool read;
  const std::vector<Member> of_function = {
      {"name", [&](const auto& where,
                   const Json& value) { return Set(ReadText(where, value), read.name); }},
      {"description",
       [](const auto& where, const Json& value) { return ReadText(where, value).status(); }},
      {"parameters",
       [&](const auto& where, const Json& value) { return ReadSchema(where, value, read); }},
      {"strict", [&](const auto& where, const Json& value) {
         return Set(ReadBool(where, value), read.strict);
       }}};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, tool, {{"type", IsFunction}, {"function", [&](const auto& where, const Json& value) {
                                            return ReadMembers(where, value, of_function);
                                          }}}));
  read.where = name + ".function";
  TREADLE_RETURN_IF_ERROR(Required(read.where + ".name", read.name));
  return read;
}

absl::StatusOr<Tool> ReadFlatTool(const std::string& name, const Json& tool,
                                  const FlatToolForm& form) {
  if (!tool.is_object()) return Expected(name, tool, "an object");
  const Json type = tool.value("type", Json());
  if (type != form.type && (form.needs_type || !type.is_null())) {
    return Expected(name + ".type", type, Json(form.type).dump());
  }
  Tool read{.name = "", .where = name, .schema = form.schema};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, tool,
      {{"name",
        [&](const auto& where, const Json& text) { return Set(ReadText(where, text), read.name); }},
       {"description",
        [](const auto& where, const Json& text) { return ReadText(where, text).status(); }},
       {form.schema,
        [&](const auto& where, const Json& schema) { return ReadSchema(where, schema, read); }},
       {"strict", [&](const auto& where,
                      const Json& strict) { return Set(ReadBool(where, strict), read.strict); }},
       {"type", [](const auto&, const Json&) { return absl::OkStatus(); }}},
      form.passed_over));
  TREADLE_RETURN_IF_ERROR(Required(name + ".name", read.name));
  return read;
}

absl::StatusOr<ToolCall> ReadToolCall(const std::string& name, const Json& value) {
  ToolCall call;
  const std::vector<Member> of_function = {
      {"name",
       [&](const auto& where, const Json& text) { return Set(ReadText(where, text), call.name); }},
      {"arguments", [&](const auto& where, const Json& text) -> absl::Status {
         TREADLE_ASSIGN_OR_RETURN(call.arguments, ReadText(where, text));
         if (call.arguments.empty()) call.arguments = "{}";
         return ParseJsonObject(call.arguments, where, kMaxJsonValues).status();
       }}};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, value,
      {{"id",
        [&](const auto& where, const Json& text) { return Set(ReadText(where, text), call.id); }},
       {"type", IsFunction},
       {"function",
        [&](const auto& where, const Json& function) {
          return ReadMembers(where, function, of_function, kPassedOver);
        }}},
      kPassedOver));
  TREADLE_RETURN_IF_ERROR(Required(name + ".id", call.id));
  TREADLE_RETURN_IF_ERROR(Required(name + ".function.name", call.name));
  TREADLE_RETURN_IF_ERROR(Required(name + ".function.arguments", call.arguments));
  return call;
}

}  // namespace

absl::StatusOr<std::vector<Tool>> ReadTools(std::string_view name, const Json& tools) {
  if (!tools.is_array()) return Expected(name, tools, "an array of tools");
  std::vector<Tool> read;
  for (size_t i = 0; i < tools.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(read.emplace_back(), ReadTool(Str(name, "[", i, "]"), tools[i]));
  }
  return read;
}

absl::StatusOr<FlatTools> ReadFlatTools(const Json& tools, std::string_view written,
                                        const FlatToolForm& form) {
  if (!tools.is_array()) return Expected("tools", tools, "an array of tools");
  FlatTools read;
  for (size_t i = 0; i < tools.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(read.tools.emplace_back(),
                             ReadFlatTool(Str("tools[", i, "]"), tools[i], form));
  }
  using Ordered = nlohmann::ordered_json;
  Ordered of_chat = Ordered::array();
  for (const Ordered& tool : Ordered::parse(written)) {
    Ordered function = Ordered::object();
    for (const auto& [member, name] : {std::pair("name", std::string_view("name")),
                                       {"description", "description"},
                                       {"parameters", form.schema}}) {
      const auto found = tool.find(name);
      if (found != tool.end() && !found->is_null()) function[member] = *found;
    }
    of_chat.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  if (!read.tools.empty()) read.as_of_chat = of_chat.dump();
  return read;
}

absl::StatusOr<ToolChoice> ReadToolChoice(std::string_view field, const Json& choice) {
  using Mode = ToolChoice::Mode;
  if (choice == "auto") return ToolChoice{Mode::kAuto};
  if (choice == "none") return ToolChoice{Mode::kNone};
  if (choice == "required") return ToolChoice{Mode::kRequired};
  if (!choice.is_object()) {
    return Expected(field, choice, R"("auto", "none", "required" or a function)");
  }
  ToolChoice read{Mode::kRequired};
  const auto name = [&](const auto& where, const Json& text) {
    return Set(ReadText(where, text), read.name);
  };
  TREADLE_RETURN_IF_ERROR(
      ReadMembers(std::string(field), choice,
                  {{"type", IsFunction}, {"function", [&](const auto& where, const Json& function) {
                                            return ReadMembers(where, function, {{"name", name}});
                                          }}}));
  TREADLE_RETURN_IF_ERROR(Required(Str(field, ".function.name"), read.name));
  return read;
}

absl::Status ConstrainCalls(std::string_view written, const std::vector<Tool>& tools,
                            const ToolChoice& choice, bool parallel, bool always,
                            const ToolFormat& format, std::optional<Constraint>& constraint) {
  const bool required = choice.mode == ToolChoice::Mode::kRequired;
  const auto strict = std::ranges::find(tools, true, &Tool::strict);
  if (!required && strict == tools.end() && !constraint && !always) return absl::OkStatus();
  if (!required && !constraint && (!format.anywhere || format.read != nullptr)) {
    return InvalidArgument(strict->where, ".strict is true, expected ",
                           "false unless tool_choice demands a call: this model's calls cannot be ",
                           "held to a schema among text");
  }
  const auto parsed = nlohmann::ordered_json::parse(written);
  std::vector<Constraint::Tag> tags;
  for (size_t i = 0; i < tools.size(); ++i) {
    const Tool& tool = tools[i];
    if (!choice.name.empty() && tool.name != choice.name) continue;
    Constraint::Tag& tag = tags.emplace_back();
    tag.field = Str(tool.where, ".", tool.schema);
    tag.begin = format.Begin(tool.name);
    tag.end = format.End();
    const auto& function = parsed[i]["function"];
    const auto parameters = function.find("parameters");
    const bool free = !required && !tool.strict;
    if (free) tag.field.clear();
    if (free && (!always || parameters == function.end())) {
      tag.schema = R"({"type":"object"})";
    } else if (parameters == function.end() || parameters->is_null()) {
      tag.schema = R"({"type":"object","additionalProperties":false})";
    } else {
      tag.schema = parameters->dump();
    }
  }
  if (tags.empty()) {
    return InvalidArgument(choice.field, " is ", Cut(Json(choice.name).dump(), kShown),
                           ", expected one of tools");
  }
  if (required || !constraint) {
    constraint = Constraint{.kind = Constraint::Kind::kTags, .field = "tools"};
    if (!required) constraint->trigger = format.open;
  }
  constraint->tags = std::move(tags);
  constraint->separator = format.separator;
  constraint->one_tag = !parallel || !choice.name.empty();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ToolCall>> ReadToolCalls(const std::string& name, const Json& calls) {
  if (!calls.is_array()) return Expected(name, calls, "an array of calls");
  std::vector<ToolCall> read;
  for (size_t i = 0; i < calls.size(); ++i) {
    TREADLE_ASSIGN_OR_RETURN(read.emplace_back(), ReadToolCall(Str(name, "[", i, "]"), calls[i]));
  }
  return read;
}

}  // namespace treadle
