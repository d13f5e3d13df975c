// The messages of a chat, as OpenAI's clients write them and send back those that they got. Errors
// are InvalidArgument and begin with the place. Pure functions; any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "models/text/jinja/chat_template.h"

namespace treadle {

// The field `messages`.
absl::StatusOr<std::vector<ChatMessage>> ReadMessages(const nlohmann::json& value);

}  // namespace treadle
