#include "server/call_environment.h"

#include <grpcpp/server_context.h>

#include <string_view>

namespace treadle {

absl::StatusOr<std::shared_ptr<ApiKey>> Authorize(const CallEnvironment& environment,
                                                  const grpc::CallbackServerContext& context) {
  if (environment.keys == nullptr) return std::shared_ptr<ApiKey>();
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return environment.keys->Find({});
  return environment.keys->Find(std::string_view(found->second.data(), found->second.size()));
}

}  // namespace treadle
