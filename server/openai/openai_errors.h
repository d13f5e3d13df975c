// Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} with a
// status of HTTP. Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/http/http_server.h"
#include "server/openai/openai_request.h"

namespace treadle {

// `kind`: of the request, by whose fields' names it is said. `max_tokens`: what the client calls
// that field. Where the client may try again, Retry-After says when.
HttpResponse OpenAiError(const absl::Status& status, OpenAiKind kind = OpenAiKind::kCompletion,
                         std::string_view max_tokens = "max_tokens");
// The answer to what the HTTP server refuses by itself.
HttpResponse OpenAiRefusal(int code, const std::string& message);

}  // namespace treadle
