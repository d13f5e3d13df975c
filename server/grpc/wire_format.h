// Between gRPC and us: byte buffers <-> messages, for methods that are served raw; and statuses.
//
// protobuf's own parser refuses a whole message for one invalid byte of a string and says nothing
// to the caller; here the error names the field ("chat.messages[0].content is not valid UTF-8 at
// byte 3"). Pure functions; any thread.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
}
namespace grpc {
class ByteBuffer;
class Status;
}  // namespace grpc

namespace treadle {

// InvalidArgument if `bytes` is no message of that type.
absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message);
absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);
grpc::ByteBuffer Serialize(const google::protobuf::Message& message);

// The two number their codes alike. RESOURCE_EXHAUSTED carries google.rpc.RetryInfo in the details.
grpc::Status ToGrpcStatus(const absl::Status& status);
// The client's side.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace treadle
