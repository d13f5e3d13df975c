// What a chat's request says of tools. Errors are InvalidArgument and begin with the field's name.
// Pure functions; any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "models/text/chat_template.h"

namespace treadle {

// The field `tools`: functions, each with a name, and perhaps a description and parameters.
absl::Status CheckTools(const nlohmann::json& tools);
// The field `tool_choice`: whether the model may call a tool.
absl::StatusOr<bool> ReadToolChoice(const nlohmann::json& choice);
// The calls of an assistant's message; `name`: of the field.
absl::StatusOr<std::vector<ToolCall>> ReadToolCalls(const std::string& name,
                                                    const nlohmann::json& calls);

}  // namespace treadle
