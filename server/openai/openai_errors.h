// Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} with a
// status of HTTP. Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/http/http_server.h"

namespace treadle {

// `names`: says fields by OpenAI's names, where sessions have their own. `max_tokens`: what the
// client calls that field. Where the client may try again, Retry-After says when.
HttpResponse OpenAiError(const absl::Status& status, bool chat = false,
                         std::string_view max_tokens = "max_tokens");
// What the HTTP server refuses by itself.
HttpResponse OpenAiRefusal(int code, const std::string& message);

}  // namespace treadle
