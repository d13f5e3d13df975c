// The routes of HTTP beside OpenAI's older API: its Responses API, Anthropic's Messages API, vLLM's
// scores, and the page.
#pragma once

#include <vector>

#include "server/http/http_server.h"
#include "server/observe/ledger_follower.h"
#include "server/session/session.h"

namespace treadle {

// Both arguments must outlive the server of these routes.
std::vector<HttpRoute> RoutesBesideOpenAi(LedgerFollower& follower, SessionEnvironment& sessions);

}  // namespace treadle
