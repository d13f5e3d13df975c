#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/remote/control.grpc.pb.h"
#include "engine/remote/control_boxes.h"
#include "engine/remote/control_secret.h"
#include "engine/remote/control_streams.h"

namespace treadle {
namespace {

using control::FollowAnswer;
using control::FollowMessage;
using control::MasterMessage;
using control::TrainAnswer;
using control::TrainRequest;
using control::WorkerMessage;

// The client's end. A hold keeps OnDone away as long as something may yet be written.
template <typename Out, typename In>
class ClientStream final : public grpc::ClientBidiReactor<Out, In>,
                           public Stream<Out>,
                           public std::enable_shared_from_this<ClientStream<Out, In>> {
 public:
  explicit ClientStream(StreamEvents<In> events) : events_(std::move(events)) {}

  // `begin` begins the call with this context and reactor. `call`: its name, for proofs of the
  // secret.
  template <typename BeginCall>
  void Begin(BeginCall begin, const std::string& secret, const std::string& call) {
    MutexLock lock(mutex_);
    self_ = this->shared_from_this();
    secret_ = secret;
    call_ = call;
    if (!secret_.empty()) {
      nonce_ = DrawNonce();
      context_.AddMetadata(kNonceKey, nonce_);
      context_.AddMetadata(kProofKey, MakeProof(secret_, ProofOf::kMaster, call_, nonce_, ""));
    }
    begin(&context_, this);
    this->AddHold();
    this->StartRead(&in_);
    this->StartCall();
  }

  void Send(Out&& message) override {
    MutexLock lock(mutex_);
    if (closing_) return;
    queue_.Push(std::move(message));
    Advance();
  }
  void Close(absl::Status status) override {
    if (!status.ok()) return Abort();
    MutexLock lock(mutex_);
    closing_ = true;
    Advance();
  }
  void Abort() override {
    MutexLock lock(mutex_);
    if (!done_) context_.TryCancel();
  }

  void OnReadInitialMetadataDone(bool ok) override {
    MutexLock lock(mutex_);
    if (!ok || secret_.empty()) return;  // the call has failed, and says why itself
    const auto& metadata = context_.GetServerInitialMetadata();
    const std::string theirs = MetadataOf(metadata, kNonceKey);
    // A call that is refused at once has none either, and says why itself.
    if (theirs.empty() && MetadataOf(metadata, kProofKey).empty()) return;
    if (!SameProof(MetadataOf(metadata, kProofKey),
                   MakeProof(secret_, ProofOf::kWorker, call_, nonce_, theirs))) {
      refused_ = absl::UnauthenticatedError(
          "the worker has another control secret (--control-secret-file)");
      context_.TryCancel();
      return;
    }
    Out message;
    message.set_proof(MakeProof(secret_, ProofOf::kMaster, call_, nonce_, theirs));
    queue_.PushFirst(std::move(message));
    secret_.clear();
    Advance();
  }
  void OnReadDone(bool ok) override {
    absl::Status taken;
    if (ok) taken = Take();
    MutexLock lock(mutex_);
    if (ok && taken.ok()) {
      paused_ = queue_.full();
      if (!paused_) this->StartRead(&in_);
      return;
    }
    if (!taken.ok()) {
      refused_ = taken;
      context_.TryCancel();
    }
    ended_ = closing_ = true;
    queue_.Drop(writing_ ? 1 : 0);
    Advance();
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    queue_.PopFirst();
    if (!ok) {
      closing_ = true;
      queue_.Drop(0);
    }
    if (!queue_.full() && std::exchange(paused_, false)) this->StartRead(&in_);
    Advance();
  }
  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<ClientStream> last;
    absl::Status refused;
    {
      MutexLock lock(mutex_);
      done_ = true;
      last = std::move(self_);
      refused = refused_;
    }
    events_.closed(refused.ok() ? absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                                               status.error_message())
                                : refused);
    events_ = {};
  }

 private:
  // Takes the message that was read. A worker says nothing before it has our proof, which it gets
  // for its own.
  absl::Status Take() {
    {
      MutexLock lock(mutex_);
      if (!secret_.empty()) {
        return absl::UnauthenticatedError(
            "the worker does not prove the control secret (--control-secret-file, on both)");
      }
    }
    TREADLE_ASSIGN_OR_RETURN(const bool whole, inbox_.Take(in_));
    if (whole) events_.message(in_);
    return absl::OkStatus();
  }
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    // Nothing is sent to a worker that has not proved the secret.
    const bool silent = !secret_.empty() && !ended_;
    if (writing_ || silent) return;
    if (!queue_.empty()) {
      writing_ = true;
      this->StartWrite(&queue_.first());
    } else if (ended_) {
      if (!std::exchange(released_, true)) this->RemoveHold();
    } else if (closing_ && !std::exchange(said_done_, true)) {
      this->StartWritesDone();
    }
  }

  StreamEvents<In> events_;  // confined to gRPC's callbacks
  In in_;                    // likewise
  ControlInbox<In> inbox_;   // likewise
  grpc::ClientContext context_;

  Mutex mutex_;
  std::shared_ptr<ClientStream> self_ ABSL_GUARDED_BY(mutex_);
  std::string secret_ ABSL_GUARDED_BY(mutex_);  // until the worker has proved it, if there is one
  std::string call_ ABSL_GUARDED_BY(mutex_);
  std::string nonce_ ABSL_GUARDED_BY(mutex_);
  absl::Status refused_ ABSL_GUARDED_BY(mutex_);  // why this end broke it off
  ControlOutbox<Out> queue_ ABSL_GUARDED_BY(mutex_);
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is read until the queue is shorter
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more is queued
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;    // nothing more is read
  bool said_done_ ABSL_GUARDED_BY(mutex_) = false;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

// One queue of gRPC's serves all client streams of a process and goes with the last of their
// channels, which gRPC up to 1.53 does wrongly when it is a callback that lets the channel go: the
// process ends in an assertion (grpc/grpc pull request 32584). A failed call on a channel that
// leads nowhere keeps the queue to the end of the process.
void KeepCallbackQueue() {
  struct Idle {
    grpc::GenericStub stub{grpc::CreateChannel("unix:/", grpc::InsecureChannelCredentials())};
    grpc::ClientContext context;
    grpc::Slice nothing;
    grpc::ByteBuffer request{&nothing, 1};
    grpc::ByteBuffer response;
    Idle() {
      stub.UnaryCall(&context, "/treadle.control.Control/Idle", {}, &request, &response,
                     [](const grpc::Status&) {});
    }
  };
  // Volatile: a pointer that nobody reads is not kept, and what it points to counts as a leak.
  static Idle* const volatile kept = new Idle;
  (void)kept;
}

std::unique_ptr<control::Control::Stub> Connect(const std::string& address,
                                                const ControlCredentials& credentials) {
  KeepCallbackQueue();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMaxWireBytes));
  // A connection of its own: no proxy, and no waiting because another one failed a moment ago.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const bool secure = credentials.channel != nullptr && !address.starts_with("unix:");
  return control::Control::NewStub(grpc::CreateCustomChannel(
      address, secure ? credentials.channel : grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace

std::shared_ptr<Stream<MasterMessage>> OpenAttach(const std::string& address,
                                                  StreamEvents<WorkerMessage> events,
                                                  const ControlCredentials& credentials) {
  const auto stub = Connect(address, credentials);
  auto stream = std::make_shared<ClientStream<MasterMessage, WorkerMessage>>(std::move(events));
  stream->Begin([&](auto* context, auto* reactor) { stub->async()->Attach(context, reactor); },
                credentials.secret, "Attach");
  return stream;
}

std::shared_ptr<Stream<FollowMessage>> OpenFollow(const std::string& address,
                                                  StreamEvents<FollowAnswer> events,
                                                  const ControlCredentials& credentials) {
  const auto stub = Connect(address, credentials);
  auto stream = std::make_shared<ClientStream<FollowMessage, FollowAnswer>>(std::move(events));
  stream->Begin([&](auto* context, auto* reactor) { stub->async()->Follow(context, reactor); },
                credentials.secret, "Follow");
  return stream;
}

std::shared_ptr<Stream<TrainRequest>> OpenTrain(const std::string& address,
                                                StreamEvents<TrainAnswer> events,
                                                const ControlCredentials& credentials) {
  const auto stub = Connect(address, credentials);
  auto stream = std::make_shared<ClientStream<TrainRequest, TrainAnswer>>(std::move(events));
  stream->Begin([&](auto* context, auto* reactor) { stub->async()->Train(context, reactor); },
                credentials.secret, "Train");
  return stream;
}

}  // namespace treadle
