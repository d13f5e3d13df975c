#include "server/grpc/rpc_status.h"

#include <grpcpp/support/status.h>

#include "base/status.h"
#include "base/utf8.h"
#include "server/grpc/rpc_details.pb.h"

namespace treadle {
namespace {

// A text goes to the client twice, in headers, three bytes for one there; clients take 8 KiB of
// them.
constexpr size_t kMaxMessageBytes = 1024;

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message = Cut(status.message(), kMaxMessageBytes);
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
