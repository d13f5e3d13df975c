// Channels of gRPC's clients. Thread safety: any thread.
#pragma once

#include <memory>
#include <string>

namespace grpc {
class Channel;
class ChannelArguments;
class ChannelCredentials;
}  // namespace grpc

namespace treadle {

// A channel to `target`, as gRPC names it: "host:port", "dns:///host:port", "ipv4:1.2.3.4:5". It
// goes through the proxy of the environment (grpc_proxy, https_proxy, http_proxy) unless no_proxy
// names the host, or the host is this machine, which a proxy knows by another name.
std::shared_ptr<grpc::Channel> OpenChannel(
    const std::string& target, const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    grpc::ChannelArguments arguments);

}  // namespace treadle
