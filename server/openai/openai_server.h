// OpenAI's API over HTTP: /v1/models, /v1/completions, /v1/chat/completions, /v1/embeddings, and
// beside them /tokenize, /detokenize, /health, /ready, /version and, where requests are stored,
// /v1/resume: the rest of a stream, after the event of Last-Event-ID, which the other two take,
// too. A prompt is a Session; a call holds one or several.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/http/http_server.h"
#include "server/observe/health.h"
#include "server/session/session.h"

namespace treadle {

// Serves from now on, beside `others`. `sessions`, `health` and what the options name must outlive
// the server, and before it ends the requests of its sessions must have. Unavailable names the
// address if it is taken.
absl::StatusOr<std::unique_ptr<HttpServer>> StartOpenAi(const std::string& listen,
                                                        HttpOptions options,
                                                        SessionEnvironment& sessions,
                                                        const HealthBoard& health,
                                                        std::vector<HttpRoute> others = {});

}  // namespace treadle
