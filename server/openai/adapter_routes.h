// The models that /v1/models lists, adapters among them, and vLLM's calls that load and unload
// adapters: /v1/load_lora_adapter and /v1/unload_lora_adapter, for operators' keys.
#pragma once

#include <vector>

#include "server/http/http_server.h"
#include "server/session/session.h"

namespace treadle {

// `sessions` must outlive the server of these routes.
std::vector<HttpRoute> ModelRoutes(SessionEnvironment& sessions);

}  // namespace treadle
