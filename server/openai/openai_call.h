// One call of an HTTP API that generates.
//
// Thread safety: StartCall on the HTTP server's thread; the rest is under the sessions'
// mutexes, then the call's own.
#pragma once

#include <memory>
#include <string>

#include "server/http/http_server.h"
#include "server/openai/http_api.h"
#include "server/session/session.h"

namespace treadle {

// An id that no other has.
std::string NewId(const std::string& prefix);

// A GET of it is the rest of a stored stream; its call is a completion's.
inline constexpr char kResumePath[] = "/v1/resume";

void StartCall(SessionEnvironment& sessions, std::unique_ptr<HttpApi> api, HttpRequest request,
               std::shared_ptr<HttpReply> reply);
// Starts a call of /v1/completions, /v1/chat/completions or /v1/embeddings.
void StartOpenAiCall(SessionEnvironment& sessions, OpenAiKind kind, HttpRequest request,
                     std::shared_ptr<HttpReply> reply);

}  // namespace treadle
