// The credentials that a client shows a server, and how it knows that server. A plain value.
#pragma once

#include <memory>
#include <string>

struct ssl_ctx_st;

namespace grpc {
class ChannelCredentials;
}  // namespace grpc

namespace treadle {

struct ClientAccess {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::shared_ptr<ssl_ctx_st> tls = {};  // the same for HTTP; null: plaintext
  std::string authorization;             // of every call; empty: none
};

}  // namespace treadle
