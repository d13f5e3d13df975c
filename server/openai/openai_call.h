// One call of /v1/completions, /v1/chat/completions or /v1/embeddings.
//
// Thread safety: StartOpenAiCall on the HTTP server's thread; the rest is under the sessions'
// mutexes, then the call's own.
#pragma once

#include <memory>
#include <string>

#include "server/http/http_server.h"
#include "server/openai/openai_request.h"
#include "server/session/session.h"

namespace treadle {

// The call's name for the client and the log: its X-Request-Id, or a new one.
std::string RequestIdOf(const HttpRequest& request, const char* prefix);

// A GET of it is the rest of a stored stream; its call is a completion's.
inline constexpr char kResumePath[] = "/v1/resume";

void StartOpenAiCall(SessionEnvironment& sessions, OpenAiKind kind, HttpRequest request,
                     std::shared_ptr<HttpReply> reply);

}  // namespace treadle
