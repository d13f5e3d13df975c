#include "server/grpc/reflection.h"

#include <grpcpp/grpcpp.h>

#include <set>
#include <utility>

#include "base/status.h"
#include "server/grpc/calls.h"
#include "server/grpc/reflection.grpc.pb.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

namespace v1alpha = grpc::reflection::v1alpha;
using google::protobuf::DescriptorPool;
using google::protobuf::FileDescriptor;

void AddWithImports(const FileDescriptor& file, std::set<const FileDescriptor*>& added,
                    v1alpha::FileDescriptorResponse& response) {
  if (!added.insert(&file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file.CopyTo(&proto);
  response.add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file.dependency_count(); ++i) {
    AddWithImports(*file.dependency(i), added, response);
  }
}

v1alpha::ServerReflectionResponse AnswerTo(const v1alpha::ServerReflectionRequest& request,
                                           const std::vector<std::string>& services) {
  v1alpha::ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  if (request.has_list_services()) {
    for (const std::string& name : services) {
      response.mutable_list_services_response()->add_service()->set_name(name);
    }
    return response;
  }
  const DescriptorPool& pool = *DescriptorPool::generated_pool();
  const FileDescriptor* file = nullptr;
  if (request.has_file_by_filename()) file = pool.FindFileByName(request.file_by_filename());
  if (request.has_file_containing_symbol()) {
    file = pool.FindFileContainingSymbol(request.file_containing_symbol());
  }
  if (file != nullptr) {
    std::set<const FileDescriptor*> added;
    AddWithImports(*file, added, *response.mutable_file_descriptor_response());
  } else {
    response.mutable_error_response()->set_error_code(grpc::StatusCode::NOT_FOUND);
    response.mutable_error_response()->set_error_message(
        "not found, expected a file or a symbol of a service that is listed");
  }
  return response;
}

// One question after the other.
class Conversation final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Conversation(const std::vector<std::string>& services) : services_(services) {
    StartRead(&question_);
  }
  void OnReadDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    v1alpha::ServerReflectionRequest request;
    if (const absl::Status status = ParseShort(question_, request, {}); !status.ok()) {
      return Finish(ToGrpcStatus(status));
    }
    answer_ = Serialize(AnswerTo(request, services_));
    StartWrite(&answer_);
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return Finish(grpc::Status::OK);
    StartRead(&question_);
  }
  void OnDone() override { delete this; }

 private:
  const std::vector<std::string>& services_;
  grpc::ByteBuffer question_, answer_;
};

class Refusal final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Refusal(const absl::Status& status) { Finish(ToGrpcStatus(status)); }
  void OnDone() override { delete this; }
};

class ReflectionService final
    : public v1alpha::ServerReflection::WithRawCallbackMethod_ServerReflectionInfo<
          v1alpha::ServerReflection::Service> {
 public:
  ReflectionService(const CallEnvironment& environment, std::vector<std::string> services)
      : environment_(environment), services_(std::move(services)) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override {
    const auto caller = environment_.sessions.Authorize(Authorization(*context));
    if (!caller.ok()) return new Refusal(caller.status());
    return new Conversation(services_);
  }

 private:
  const CallEnvironment& environment_;
  const std::vector<std::string> services_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeReflectionService(const CallEnvironment& environment,
                                                     std::vector<std::string> services) {
  return std::make_unique<ReflectionService>(environment, std::move(services));
}

}  // namespace treadle
