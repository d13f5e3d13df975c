// A server stream that ends before it begins. For leaf files, which include gRPC themselves.
//
// Thread safety: gRPC's.
#pragma once

#include "server/rpc_status.h"

namespace grpc {
template <typename Message>
class ServerWriteReactor;
}  // namespace grpc

namespace treadle {

template <typename Message>
class RefusedStream final : public grpc::ServerWriteReactor<Message> {
 public:
  explicit RefusedStream(const absl::Status& status) { this->Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

}  // namespace treadle
