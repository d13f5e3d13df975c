#include "server/openai/tool_request.h"

#include <functional>
#include <string_view>
#include <utility>

#include "base/json_file.h"
#include "base/status.h"
#include "server/openai/json_fields.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

struct Member {
  std::string_view name;
  std::function<absl::Status(const std::string& name, const Json& value)> read;
};

// An object of these members; what is null is absent, and of another name refused.
absl::Status ReadMembers(const std::string& name, const Json& object,
                         const std::vector<Member>& members) {
  if (!object.is_object()) return Expected(name, object, "an object");
  for (const auto& [key, value] : object.items()) {
    const auto is_it = [&key = key](const Member& member) { return member.name == key; };
    const auto member = std::ranges::find_if(members, is_it);
    if (value.is_null()) continue;
    if (member == members.end()) return InvalidArgument(name, ".", key, " is not supported");
    TREADLE_RETURN_IF_ERROR(member->read(name + "." + key, value));
  }
  return absl::OkStatus();
}

absl::Status IsFunction(const std::string& name, const Json& value) {
  return value == "function" ? absl::OkStatus() : Expected(name, value, "\"function\"");
}

// A text that must be there has at least one byte.
absl::Status Required(const std::string& name, const std::string& text) {
  return text.empty() ? InvalidArgument(name, " is missing") : absl::OkStatus();
}

absl::Status CheckTool(const std::string& name, const Json& tool) {
  std::string function;
  const std::vector<Member> of_function = {
      {"name",
       [&](const auto& where, const Json& value) { return Set(ReadText(where, value), function); }},
      {"description",
       [](const auto& where, const Json& value) { return ReadText(where, value).status(); }},
      {"parameters",
       [](const auto& where, const Json& value) {
         return value.is_object() ? absl::OkStatus() : Expected(where, value, "an object");
       }},
      {"strict", [](const auto& where, const Json& value) {
         return value == false ? absl::OkStatus()
                               : Expected(where, value, "false: arguments are not enforced");
       }}};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, tool, {{"type", IsFunction}, {"function", [&](const auto& where, const Json& value) {
                                            return ReadMembers(where, value, of_function);
                                          }}}));
  return Required(name + ".function.name", function);
}

absl::StatusOr<ToolCall> ReadToolCall(const std::string& name, const Json& value) {
  ToolCall call;
  const std::vector<Member> of_function = {
      {"name",
       [&](const auto& where, const Json& text) { return Set(ReadText(where, text), call.name); }},
      {"arguments", [&](const auto& where, const Json& text) -> absl::Status {
         TREADLE_ASSIGN_OR_RETURN(call.arguments, ReadText(where, text));
         if (call.arguments.empty()) call.arguments = "{}";
         return ParseJsonObject(call.arguments, where).status();
       }}};
  TREADLE_RETURN_IF_ERROR(ReadMembers(
      name, value,
      {{"id",
        [&](const auto& where, const Json& text) { return Set(ReadText(where, text), call.id); }},
       {"type", IsFunction},
       {"function", [&](const auto& where, const Json& function) {
          return ReadMembers(where, function, of_function);
        }}}));
  TREADLE_RETURN_IF_ERROR(Required(name + ".id", call.id));
  TREADLE_RETURN_IF_ERROR(Required(name + ".function.name", call.name));
  TREADLE_RETURN_IF_ERROR(Required(name + ".function.arguments", call.arguments));
  return call;
}

}  // namespace

absl::Status CheckTools(const Json& tools) {
  if (!tools.is_array()) return Expected("tools", tools, "an array of tools");
  for (size_t i = 0; i < tools.size(); ++i) {
    TREADLE_RETURN_IF_ERROR(CheckTool(Str("tools[", i, "]"), tools[i]));
  }
  return absl::OkStatus();
}

// To demand a call takes an answer that is held to a grammar.
absl::StatusOr<bool> ReadToolChoice(const Json& choice) {
  if (choice == "auto") return true;
  if (choice == "none") return false;
  return Expected("tool_choice", choice, "\"auto\" or \"none\"");
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
