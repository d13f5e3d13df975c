// OpenAI's Responses API over HTTP: /v1/responses, and /v1/responses/ID of one that is kept.
#pragma once

#include <vector>

#include "server/http/http_server.h"
#include "server/session/session.h"

namespace treadle {

// `sessions` must outlive the server of these routes.
std::vector<HttpRoute> ResponsesRoutes(SessionEnvironment& sessions);

}  // namespace treadle
