// The tools of a chat's request. Errors are InvalidArgument and begin with the field's name.
// Pure functions; any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "models/text/jinja/chat_template.h"
#include "server/constraint/constraint.h"
#include "server/openai/tools/tool_calls.h"

namespace treadle {

// One of the field `tools`: a function, perhaps with a description and a schema of its parameters.
struct Tool {
  std::string name;
  bool strict = false;  // what it is called with satisfies the schema
  // For errors: where it stands in the body, and what its schema is called there.
  std::string where = {};
  std::string_view schema = "parameters";
  std::set<std::string> texts = {};  // parameters that are texts by the schema
};
absl::StatusOr<std::vector<Tool>> ReadTools(std::string_view name, const nlohmann::json& tools);

// How APIs beside chats write a function: {"type", "name", "description", `schema`, "strict"}.
struct FlatToolForm {
  std::string_view type;  // of a function
  bool needs_type;        // else it may be missing
  std::string_view schema;
  std::span<const std::string_view> passed_over;  // members without effect
};
// The same tools, and as a chat writes them, members in their order. `written`: `tools` as text.
struct FlatTools {
  std::vector<Tool> tools;
  std::string as_of_chat;
};
absl::StatusOr<FlatTools> ReadFlatTools(const nlohmann::json& tools, std::string_view written,
                                        const FlatToolForm& form);

// The field `tool_choice`.
struct ToolChoice {
  enum class Mode : uint8_t { kNone, kAuto, kRequired };
  Mode mode = Mode::kAuto;
  std::string name = {};  // of the one that must be called; empty: any
  std::string_view field = "tool_choice.function.name";  // what the client calls it
};
absl::StatusOr<ToolChoice> ReadToolChoice(std::string_view field, const nlohmann::json& choice);

// Holds an answer that is unconstrained, or has `constraint`, to calls that satisfy their tools'
// schemas, as far as that was asked. `written`: the field `tools`, as the client wrote it.
// `always`: every call that begins is held to its tool's schema, where that can be enforced.
absl::Status ConstrainCalls(std::string_view written, const std::vector<Tool>& tools,
                            const ToolChoice& choice, bool parallel, bool always,
                            const ToolFormat& format, std::optional<Constraint>& constraint);

// The calls of an assistant's message; `name`: of the field.
absl::StatusOr<std::vector<ToolCall>> ReadToolCalls(const std::string& name,
                                                    const nlohmann::json& calls);

}  // namespace treadle
