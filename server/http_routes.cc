#include "server/http_routes.h"

#include <algorithm>
#include <iterator>

#include "server/anthropic/messages_routes.h"
#include "server/openai/scoring.h"
#include "server/page/page_routes.h"
#include "server/responses/responses_routes.h"

namespace treadle {

std::vector<HttpRoute> RoutesBesideOpenAi(LedgerFollower& follower, SessionEnvironment& sessions) {
  std::vector<HttpRoute> routes = PageRoutes(follower, sessions);
  std::ranges::move(MessagesRoutes(sessions), std::back_inserter(routes));
  std::ranges::move(ResponsesRoutes(sessions), std::back_inserter(routes));
  std::ranges::move(ScoringRoutes(sessions), std::back_inserter(routes));
  return routes;
}

}  // namespace treadle
