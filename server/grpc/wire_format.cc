#include "server/grpc/wire_format.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <map>

#include "base/status.h"
#include "base/utf8.h"
#include "server/grpc/rpc_details.pb.h"

namespace treadle {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

// A text goes to the client twice, in headers, three bytes for one there; clients take 8 KiB of
// them.
constexpr size_t kMaxMessageBytes = 1024;
// A client that was refused because the queue is full should wait this long.
constexpr int kRetryDelaySeconds = 1;

// Looks for the string that made the parser refuse. Depth is bounded by the schema.
absl::Status FindBadString(std::string_view bytes, const Descriptor& type,
                           const std::string& prefix) {
  UnknownFieldSet fields;
  if (!fields.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return InvalidArgument(prefix.empty() ? "the request" : prefix, " is not a message of type ",
                           type.full_name());
  }
  std::map<int, int> counts;  // by field number
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& value = fields.field(i);
    const FieldDescriptor* field = type.FindFieldByNumber(value.number());
    const int index = counts[value.number()]++;
    if (field == nullptr || value.type() != UnknownField::TYPE_LENGTH_DELIMITED) continue;
    std::string name = prefix.empty() ? field->name() : prefix + "." + field->name();
    if (field->is_repeated()) name += Str("[", index, "]");
    if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
      TREADLE_RETURN_IF_ERROR(
          FindBadString(value.length_delimited(), *field->message_type(), name));
    } else if (field->type() == FieldDescriptor::TYPE_STRING) {
      const size_t bad = FindInvalidUtf8(value.length_delimited());
      if (bad != std::string_view::npos) {
        return InvalidArgument(name, " is not valid UTF-8 at byte ", bad, ", expected UTF-8 text");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseMessage(std::string_view bytes, google::protobuf::Message& message) {
  // The parser reports a bad string to the log as well as to us; look first, so it has nothing to
  // say.
  TREADLE_RETURN_IF_ERROR(FindBadString(bytes, *message.GetDescriptor(), ""));
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return InvalidArgument("the request is not a message of type ",
                           message.GetDescriptor()->full_name());
  }
  return absl::OkStatus();
}

absl::Status Parse(const grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  grpc::Slice whole;
  if (!bytes.DumpToSingleSlice(&whole).ok()) {
    return Internal("the request's bytes could not be read");
  }
  return ParseMessage({reinterpret_cast<const char*>(whole.begin()), whole.size()}, message);
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message = Cut(std::string(status.message()), kMaxMessageBytes);
  if (code != grpc::StatusCode::RESOURCE_EXHAUSTED) return grpc::Status(code, message);
  rpc::RetryInfo retry;
  retry.mutable_retry_delay()->set_seconds(kRetryDelaySeconds);
  rpc::Status details;
  details.set_code(code);
  details.set_message(message);
  google::protobuf::Any* detail = details.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  detail->set_value(retry.SerializeAsString());
  return grpc::Status(code, message, details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace treadle
