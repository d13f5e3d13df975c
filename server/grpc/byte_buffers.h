// gRPC byte buffers <-> messages, for methods that are served raw.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace google::protobuf {
class Message;
class MessageLite;
}  // namespace google::protobuf
namespace grpc {
class ByteBuffer;
}

namespace treadle {

// InvalidArgument names the field that is malformed.
absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message);
grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message);

}  // namespace treadle
