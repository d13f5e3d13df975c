#include "server/gateway/gateway_generate.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <optional>

#include "base/status.h"
#include "server/gateway/gateway_messages.h"
#include "server/gateway/vllm_engine.pb.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

class GenerateCall final : public StreamReactor, public Session {
 public:
  GenerateCall(CallEnvironment& environment, NamedCalls& calls, RpcContext* context,
               std::string owner)
      : Session(environment.sessions),
        model_(environment.sessions.model),
        calls_(calls),
        context_(context),
        name_(std::move(owner), "") {}

  // On the work pool, before anything is written.
  absl::StatusOr<GenerateRequest> ReadRequest(const ByteBuffer& bytes) {
    vllm::grpc::engine::GenerateRequest message;
    TREADLE_RETURN_IF_ERROR(Parse(bytes, message, [this](std::string_view field, int64_t entries) {
      return ValidateGatewayEntries(field, entries, /*embedding=*/false, model_);
    }));
    TREADLE_ASSIGN_OR_RETURN(GenerateRequest request, ToRequest(message, model_));
    MutexLock lock(messages_mutex_);
    answer_.emplace(message);
    name_.second = message.request_id();
    if (!name_.second.empty()) calls_.Add(name_, weak_from_this());
    return request;
  }

  void Abort() {
    aborted_ = true;
    Cancel();
  }

  void OnWriteDone(bool ok) override {
    {
      MutexLock lock(messages_mutex_);
      if (ok && next_ < messages_.size()) return WriteNext();
      if (ended_ && !ok) Finish(grpc::Status::CANCELLED);
    }
    Written(ok);
  }
  void OnCancel() override { Cancel(); }
  void OnDone() override {
    {
      MutexLock lock(messages_mutex_);
      if (!name_.second.empty()) calls_.Remove(name_, this);
    }
    Release();
  }

 private:
  bool Write(const SessionEvent& event) override {
    MutexLock lock(messages_mutex_);
    return !Tell(answer_->Add(event), event.end != nullptr);
  }
  void Fail(const absl::Status& status) override {
    MutexLock lock(messages_mutex_);
    if (aborted_ && answer_) {
      Tell(answer_->Abort(), true);
    } else {
      Finish(ToGrpcStatus(InGatewayNames(status)));
    }
  }
  void BreakWrite() override { context_->TryCancel(); }

  // False: there is nothing to write. `last`: the call ends with these.
  bool Tell(const GatewayAnswer::Messages& messages, bool last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(messages_mutex_) {
    messages_.clear();
    next_ = 0;
    for (const auto& message : messages) messages_.push_back(Serialize(message));
    ended_ = last;
    if (messages_.empty()) {
      if (last) Finish(grpc::Status::OK);
      return false;
    }
    WriteNext();
    return true;
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(messages_mutex_) {
    const ByteBuffer& message = messages_[next_++];
    if (ended_ && next_ == messages_.size()) {
      StartWriteAndFinish(&message, grpc::WriteOptions(), grpc::Status::OK);
    } else {
      StartWrite(&message);
    }
  }

  const ServedModel& model_;
  NamedCalls& calls_;
  RpcContext* const context_;  // gRPC's; valid until OnDone
  std::atomic<bool> aborted_ = false;

  // Taken behind the session's own.
  Mutex messages_mutex_;
  NamedCalls::Name name_ ABSL_GUARDED_BY(messages_mutex_);
  std::optional<GatewayAnswer> answer_
      ABSL_GUARDED_BY(messages_mutex_);  // none before the request was read
  // Messages of one event, to be written from next_ on; each is valid until its write is done.
  std::vector<ByteBuffer> messages_ ABSL_GUARDED_BY(messages_mutex_);
  size_t next_ ABSL_GUARDED_BY(messages_mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(messages_mutex_) = false;  // nothing comes behind messages_
};

}  // namespace

void NamedCalls::Add(const Name& name, std::weak_ptr<Session> call) {
  const Session* const key = call.lock().get();
  MutexLock lock(mutex_);
  calls_.emplace(name, std::pair(key, std::move(call)));
}

void NamedCalls::Remove(const Name& name, const Session* call) {
  MutexLock lock(mutex_);
  const auto [begin, end] = calls_.equal_range(name);
  for (auto at = begin; at != end; ++at) {
    if (at->second.first != call) continue;
    calls_.erase(at);
    return;
  }
}

std::vector<std::shared_ptr<Session>> NamedCalls::Find(const Name& name) const {
  std::vector<std::shared_ptr<Session>> found;
  MutexLock lock(mutex_);
  const auto [begin, end] = calls_.equal_range(name);
  for (auto at = begin; at != end; ++at) {
    if (auto call = at->second.second.lock()) found.push_back(std::move(call));
  }
  return found;
}

StreamReactor* StartGatewayGenerate(CallEnvironment& environment, NamedCalls& calls,
                                    RpcContext* context, const ByteBuffer* request) {
  // A call without a key that counts ends before anybody could find it.
  const auto owner = environment.sessions.OwnerOf(Authorization(*context));
  auto call = std::make_shared<GenerateCall>(environment, calls, context, owner.value_or(""));
  call->Start(CallerOf(environment, *context), request->Length(),
              [call = call.get(), request] { return call->ReadRequest(*request); });
  return call.get();
}

void AbortGatewayCalls(const NamedCalls& calls, const NamedCalls::Name& name) {
  for (const auto& call : calls.Find(name)) static_cast<GenerateCall&>(*call).Abort();
}

}  // namespace treadle
