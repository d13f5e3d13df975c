#include "server/grpc/byte_buffers.h"

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <vector>

#include "base/status.h"
#include "server/grpc/wire_format.h"

namespace treadle {

absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  std::vector<grpc::Slice> slices;
  if (!bytes.Dump(&slices).ok()) return Internal("the request's bytes could not be read");
  if (slices.size() == 1) {
    return ParseMessage({reinterpret_cast<const char*>(slices[0].begin()), slices[0].size()},
                        message);
  }
  std::string all;
  all.reserve(bytes.Length());
  for (const grpc::Slice& slice : slices) {
    all.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return ParseMessage(all, message);
}

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message) {
  const std::string bytes = message.SerializeAsString();
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace treadle
