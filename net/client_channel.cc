#include "net/client_channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/support/channel_arguments.h>

#include "net/address.h"

namespace treadle {
namespace {

// Whether all that stands in `target` behind its scheme is an address of loopback.
bool IsOnThisMachine(const std::string& target) {
  std::string address = target.substr(target.rfind('/') + 1);
  for (const std::string_view scheme : {"ipv4:", "ipv6:", "dns:"}) {
    if (address.starts_with(scheme)) address.erase(0, scheme.size());
  }
  const auto parsed = ParseAddress(address);
  return parsed.ok() && IsLoopback(parsed->host);
}

}  // namespace

std::shared_ptr<grpc::Channel> OpenChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments) {
  if (IsOnThisMachine(target)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

}  // namespace treadle
