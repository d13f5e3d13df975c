#include "server/gateway/tokenizer_archive.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <map>
#include <span>
#include <utility>

#include "base/sha256.h"
#include "base/status.h"
#include "server/gateway/gateway_common.pb.h"
#include "server/gateway/zip_archive.h"
#include "server/grpc/wire_format.h"

namespace treadle {
namespace {

using smg::grpc::common::GetTokenizerChunk;

constexpr size_t kChunkBytes = 64 << 10;

class TokenizerCall final : public StreamReactor,
                            public Recipient,
                            public std::enable_shared_from_this<TokenizerCall> {
 public:
  TokenizerCall(CallEnvironment& environment, TokenizerArchive& archive, RpcContext* context)
      : environment_(environment), archive_(archive), context_(context) {
    environment_.sessions.calls.Add();
    ++archive_.calls;
  }

  void Begin() {
    {
      MutexLock lock(mutex_);
      self_ = shared_from_this();
    }
    const absl::Status status = TakeIn();
    if (!status.ok()) Finish(ToGrpcStatus(status));
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    if (!ok) return Finish(grpc::Status::CANCELLED);
    WriteNext();
  }
  void OnDone() override {
    --archive_.calls;
    environment_.sessions.calls.Remove();
    std::shared_ptr<TokenizerCall> last;  // released after the lock
    MutexLock lock(mutex_);
    last = std::move(self_);
  }

  void Deliver() override {}
  // Its time is over.
  void OnAlarm() override {
    MutexLock lock(mutex_);
    if (self_) context_->TryCancel();
  }

 private:
  absl::Status TakeIn() {
    SessionEnvironment& sessions = environment_.sessions;
    TREADLE_RETURN_IF_ERROR(sessions.Authorize(Authorization(*context_)).status());
    if (archive_.calls > TokenizerArchive::kMaxCalls) {
      return sessions.refusals->Add(
          ResourceExhausted("GetTokenizer: ", TokenizerArchive::kMaxCalls,
                            " calls are under way, as many as there may be"));
    }
    sessions.courier.WakeAt(Clock::now() + sessions.stall_timeout, shared_from_this());
    return sessions.Submit(Authorization(*context_), CallerOf(environment_, *context_).origin, 0,
                           [self = shared_from_this()] { self->Send(self->archive_.Get()); });
  }

  void Send(absl::StatusOr<std::shared_ptr<const TokenizerArchive::Archive>> archive) {
    MutexLock lock(mutex_);
    if (!archive.ok()) {
      return Finish(ToGrpcStatus(environment_.sessions.refusals->Add(archive.status())));
    }
    bytes_ = *std::move(archive);
    WriteNext();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    GetTokenizerChunk chunk;
    chunk.set_data(bytes_->bytes.substr(sent_, kChunkBytes));
    sent_ += chunk.data().size();
    const bool last = sent_ >= bytes_->bytes.size();
    if (last) chunk.set_sha256(bytes_->sha256);
    chunk_ = Serialize(chunk);
    if (!last) return StartWrite(&chunk_);
    StartWriteAndFinish(&chunk_, grpc::WriteOptions(), grpc::Status::OK);
  }

  CallEnvironment& environment_;
  TokenizerArchive& archive_;
  RpcContext* const context_;  // gRPC's; valid until OnDone

  Mutex mutex_;
  std::shared_ptr<TokenizerCall> self_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const TokenizerArchive::Archive> bytes_ ABSL_GUARDED_BY(mutex_);
  size_t sent_ ABSL_GUARDED_BY(mutex_) = 0;
  ByteBuffer chunk_ ABSL_GUARDED_BY(mutex_);  // valid until its write is done
};

}  // namespace

absl::StatusOr<std::shared_ptr<const TokenizerArchive::Archive>> TokenizerArchive::Get() {
  if (!model_.tokenizer_files) {
    return absl::FailedPreconditionError("this model has no tokenizer: it serves token ids only");
  }
  MutexLock lock(mutex_);
  if (made_) return made_;
  TREADLE_ASSIGN_OR_RETURN(const auto files, model_.tokenizer_files());
  if (files.empty()) {
    return absl::FailedPreconditionError(
        "the model's file has a SentencePiece tokenizer, of which no tokenizer.json can be "
        "written; expected a gateway that has the tokenizer's folder itself");
  }
  Archive archive{.bytes = ZipArchive(files), .sha256 = {}};
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(archive.bytes)));
  archive.sha256 = sum.Finish();
  made_ = std::make_shared<const Archive>(std::move(archive));
  return made_;
}

StreamReactor* StartGetTokenizer(CallEnvironment& environment, TokenizerArchive& archive,
                                 RpcContext* context) {
  auto call = std::make_shared<TokenizerCall>(environment, archive, context);
  call->Begin();
  return call.get();
}

}  // namespace treadle
