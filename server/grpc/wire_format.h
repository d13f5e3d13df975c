// Between gRPC and us: byte buffers <-> messages, for methods that are served raw; and statuses.
//
// protobuf's own parser refuses a whole message for one invalid byte of a string and says nothing
// to the caller; here the error names the field ("chat.messages[0].content is not valid UTF-8 at
// byte 3"). Repeated fields are counted before anything is parsed, because the parser takes up to a
// hundred bytes of memory for each two that it reads. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <functional>
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

// Refuses a repeated field ("chat.messages") that has too many entries.
using CheckEntries = std::function<absl::Status(std::string_view field, int64_t entries)>;

// InvalidArgument if `bytes` is no message of that type, or has more than 1024 unknown fields. An
// error of `check` is given as it is, and nothing was parsed then; empty: any count is allowed.
absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message,
                          const CheckEntries& check = {});
absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message,
                   const CheckEntries& check = {});
// Parses a message on gRPC's own threads; it may have 512 KiB.
absl::Status ParseShort(const grpc::ByteBuffer& bytes, google::protobuf::Message& message,
                        const CheckEntries& check = {});
grpc::ByteBuffer Serialize(const google::protobuf::Message& message);

// The two number their codes alike. RESOURCE_EXHAUSTED carries google.rpc.RetryInfo in the details.
grpc::Status ToGrpcStatus(const absl::Status& status);
// The client's side.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace treadle
