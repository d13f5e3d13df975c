// Anthropic's Messages API over HTTP: /v1/messages and /v1/messages/count_tokens. A key comes in
// the header x-api-key or, as elsewhere, in Authorization.
#pragma once

#include <vector>

#include "server/http/http_server.h"
#include "server/session/session.h"

namespace treadle {

// `sessions` must outlive the server of these routes.
std::vector<HttpRoute> MessagesRoutes(SessionEnvironment& sessions);

}  // namespace treadle
