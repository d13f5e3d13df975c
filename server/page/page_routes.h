// The page at "/", where a browser chats with the model and sees the iterations go by, and its
// feed: GET /timeline streams the iteration ledger from now on, a JSON object on each line. The
// first line has the server's limits, {"lost": n} stands for records that a slow reader missed, and
// all others are records as --ledger-file has them, with the server's own numbers of requests and
// without the ids that clients chose.
#pragma once

#include <vector>

#include "server/http/http_server.h"
#include "server/observe/ledger_follower.h"
#include "server/session/session.h"

namespace treadle {

inline constexpr int kTimelineReaders = 16;  // at once; more are refused

// Files are for everybody, the feed for who has a key where keys are wanted. Both arguments must
// outlive the server of the routes.
std::vector<HttpRoute> PageRoutes(LedgerFollower& follower, const SessionEnvironment& sessions);

}  // namespace treadle
