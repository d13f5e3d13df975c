#include "server/grpc/call_environment.h"

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

RequestOrigin OriginOf(const grpc::CallbackServerContext& context) {
  RequestOrigin origin;
  origin.client = context.peer();
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("x-request-id");
  if (found != metadata.end()) {
    origin.header_id = PrintableId({found->second.data(), found->second.size()});
  }
  return origin;
}

}  // namespace treadle
