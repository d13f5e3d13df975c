// A server stream that ends before it begins. Thread safety: any thread.
#pragma once

#include "absl/status/status.h"

namespace grpc {
template <class W>
class ServerWriteReactor;
}

namespace treadle {

// For GenerateStream (grpc::ByteBuffer) and WatchLedger (v1::LedgerRecord); gRPC owns the result.
template <typename Message>
grpc::ServerWriteReactor<Message>* RefuseStream(const absl::Status& status);

}  // namespace treadle
