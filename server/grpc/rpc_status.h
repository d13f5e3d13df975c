// absl::Status as a gRPC status. The two number their codes alike. RESOURCE_EXHAUSTED carries
// google.rpc.RetryInfo in the status details. Pure; any thread.
#pragma once

#include "absl/status/status.h"

namespace grpc {
class Status;
}

namespace treadle {

// A client that was refused because the queue is full should wait this long.
inline constexpr int kRetryDelaySeconds = 1;

grpc::Status ToGrpcStatus(const absl::Status& status);
// The client's side.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace treadle
