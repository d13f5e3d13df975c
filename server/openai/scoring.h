// How near texts are to each other, by the cosine of their embeddings: /v1/score and /v1/rerank, as
// vLLM has them for models that embed. They need a server with --embedding-pooling.
#pragma once

#include <vector>

#include "server/http/http_server.h"
#include "server/session/session.h"

namespace treadle {

// `sessions` must outlive the server of these routes.
std::vector<HttpRoute> ScoringRoutes(SessionEnvironment& sessions);

}  // namespace treadle
