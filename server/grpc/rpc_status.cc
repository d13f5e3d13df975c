#include "server/grpc/rpc_status.h"

#include <grpcpp/support/status.h>

#include "base/status.h"
#include "server/grpc/rpc_details.pb.h"

namespace treadle {

grpc::Status ToGrpcStatus(const absl::Status& status) {
  const auto code = static_cast<grpc::StatusCode>(status.code());
  const std::string message(status.message());
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
