// Tools for models whose chat template knows none: what it would write stands in plain messages.
//
// Pure functions; any thread.
#pragma once

#include <string_view>
#include <vector>

#include "models/text/jinja/chat_template.h"

namespace treadle {

// Describes `tools`, a JSON array as OpenAI's (empty: none are offered), in the system's message,
// or in the first one where the template has no place for that; and rewrites calls and their
// results as text of the assistant and of the user, in GenericToolFormat.
void WriteToolsAsText(std::string_view tools, const ChatTemplate& chat_template,
                      std::vector<ChatMessage>& messages);

}  // namespace treadle
