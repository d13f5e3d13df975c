#include "server/grpc/refused_stream.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include "server/grpc/inference.pb.h"
#include "server/grpc/rpc_status.h"

namespace treadle {
namespace {

template <typename Message>
class RefusedStream final : public grpc::ServerWriteReactor<Message> {
 public:
  explicit RefusedStream(const absl::Status& status) { this->Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

template <typename Message>
grpc::ServerWriteReactor<Message>* RefuseStream(const absl::Status& status) {
  return new RefusedStream<Message>(status);
}

template grpc::ServerWriteReactor<grpc::ByteBuffer>* RefuseStream(const absl::Status&);
template grpc::ServerWriteReactor<v1::LedgerRecord>* RefuseStream(const absl::Status&);

}  // namespace treadle
