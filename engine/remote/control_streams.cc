#include "engine/remote/control_streams.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <functional>
#include <map>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/remote/control.grpc.pb.h"
#include "engine/remote/control_boxes.h"
#include "engine/remote/control_secret.h"

namespace treadle {
namespace {

// Streams of a server that have said nothing yet. A master and a neighbour say hello at once.
constexpr size_t kMostSilentStreams = 64;

constexpr char kNonceKey[] = "treadle-nonce-bin";
constexpr char kProofKey[] = "treadle-proof-bin";

std::string MetadataOf(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                       const char* key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
}

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}
absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

// Counts the streams of a server, so that it can wait for the last, and ends the oldest silent one
// when there are too many.
class LiveStreams {
 public:
  using Number = uint64_t;

  Number Add(std::function<void()> abort) {
    std::function<void()> oldest;
    Number number = 0;
    {
      MutexLock lock(mutex_);
      ++live_;
      number = next_++;
      silent_.emplace(number, std::move(abort));
      if (silent_.size() > kMostSilentStreams) {
        oldest = std::move(silent_.begin()->second);
        silent_.erase(silent_.begin());
      }
    }
    if (oldest) oldest();
    return number;
  }
  // It is a peer that is known.
  void Heard(Number number) {
    MutexLock lock(mutex_);
    silent_.erase(number);
  }
  void Remove(Number number) {
    MutexLock lock(mutex_);
    silent_.erase(number);
    if (--live_ == 0) none_.NotifyAll();
  }
  void WaitForNone() {
    MutexLock lock(mutex_);
    while (live_ > 0) none_.Wait(mutex_);
  }

 private:
  Mutex mutex_;
  CondVar none_;
  int live_ ABSL_GUARDED_BY(mutex_) = 0;
  Number next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<Number, std::function<void()>> silent_ ABSL_GUARDED_BY(mutex_);
};

// The server's end. It keeps itself alive until OnDone; afterwards whoever holds it may still call.
template <typename In, typename Out>
class ServerStream final : public grpc::ServerBidiReactor<In, Out>,
                           public Stream<Out>,
                           public std::enable_shared_from_this<ServerStream<In, Out>> {
 public:
  ServerStream(grpc::CallbackServerContext& context, LiveStreams& live)
      : context_(context), live_(live) {}

  // `call`: its name, for proofs of the secret.
  void Begin(StreamEvents<In> events, const std::string& secret, const std::string& call) {
    events_ = std::move(events);
    number_ = live_.Add([weak = this->weak_from_this()] {
      if (const auto self = weak.lock()) self->Abort();
    });
    const absl::Status proven = ProveSecret(secret, call);
    {
      MutexLock lock(mutex_);
      self_ = this->shared_from_this();
      if (proven.ok()) return this->StartRead(&in_);
    }
    Close(proven);
  }

  void Send(Out&& message) override {
    MutexLock lock(mutex_);
    if (closing_) return;
    queue_.Push(std::move(message));
    Advance();
  }
  void Close(absl::Status status) override {
    MutexLock lock(mutex_);
    if (closing_) return;
    closing_ = true;
    status_ = std::move(status);
    Advance();
  }
  void Abort() override {
    MutexLock lock(mutex_);
    if (!done_) context_.TryCancel();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Close(absl::OkStatus());
    const absl::Status taken = Take();
    if (!taken.ok()) {
      in_ = In();
      return Close(taken);
    }
    MutexLock lock(mutex_);
    paused_ = queue_.full();
    if (!closing_ && !paused_) this->StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    queue_.PopFirst();
    if (!ok) Break();
    if (!closing_ && !queue_.full() && std::exchange(paused_, false)) this->StartRead(&in_);
    Advance();
  }
  void OnCancel() override {
    MutexLock lock(mutex_);
    Break();
    Advance();
  }
  void OnDone() override {
    absl::Status status;
    std::shared_ptr<ServerStream> last;
    {
      MutexLock lock(mutex_);
      done_ = true;
      status = broken_ && status_.ok() ? absl::UnavailableError("the stream broke") : status_;
      last = std::move(self_);
    }
    events_.closed(status);
    events_ = {};
    live_.Remove(number_);
  }

 private:
  // Answers the opener's nonce with a proof and a nonce of our own, and expects a proof.
  absl::Status ProveSecret(const std::string& secret, const std::string& call) {
    const std::string theirs = MetadataOf(context_.client_metadata(), kNonceKey);
    if (secret.empty() != theirs.empty()) {
      return absl::UnauthenticatedError(
          secret.empty() ? "the worker has no control secret, who calls it has one "
                           "(--control-secret-file, on both)"
                         : "the worker wants proof of its control secret "
                           "(--control-secret-file, on both)");
    }
    if (secret.empty()) return absl::OkStatus();
    // Before anything is read: gRPC keeps all of a message, whatever its size, until it is whole.
    // Who has listened to another call can say this again, and still has to prove the rest.
    if (!SameProof(MetadataOf(context_.client_metadata(), kProofKey),
                   MakeProof(secret, ProofOf::kMaster, call, theirs, ""))) {
      return absl::UnauthenticatedError(
          "who calls this worker has another control secret (--control-secret-file)");
    }
    const std::string ours = DrawNonce();
    expected_proof_ = MakeProof(secret, ProofOf::kMaster, call, theirs, ours);
    context_.AddInitialMetadata(kNonceKey, ours);
    context_.AddInitialMetadata(kProofKey, MakeProof(secret, ProofOf::kWorker, call, theirs, ours));
    this->StartSendInitialMetadata();
    return absl::OkStatus();
  }
  // What was read.
  absl::Status Take() {
    TREADLE_ASSIGN_OR_RETURN(const bool whole, inbox_.Take(in_));
    if (!expected_proof_.empty()) {
      if (!SameProof(in_.proof(), std::exchange(expected_proof_, {}))) {
        return absl::UnauthenticatedError(
            "who calls this worker has another control secret (--control-secret-file)");
      }
      live_.Heard(number_);
      return absl::OkStatus();
    }
    if (!whole) return absl::OkStatus();
    live_.Heard(number_);
    events_.message(in_);
    return absl::OkStatus();
  }

  void Break() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    broken_ = closing_ = true;
    queue_.Drop(writing_ ? 1 : 0);
  }
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || writing_) return;
    if (!queue_.empty()) {
      writing_ = true;
      this->StartWrite(&queue_.first());
    } else if (closing_) {
      finished_ = true;
      this->Finish(ToGrpc(status_));
    }
  }

  grpc::CallbackServerContext& context_;  // until done_
  LiveStreams& live_;                     // until OnDone returns
  StreamEvents<In> events_;               // confined to gRPC's callbacks after Begin
  In in_;                                 // likewise
  ControlInbox<In> inbox_;                // likewise
  std::string expected_proof_;            // likewise; empty: it has come, or none is wanted
  LiveStreams::Number number_ = 0;        // constant after Begin

  Mutex mutex_;
  std::shared_ptr<ServerStream> self_ ABSL_GUARDED_BY(mutex_);
  ControlOutbox<Out> queue_ ABSL_GUARDED_BY(mutex_);  // the first is being written if writing_
  bool paused_ ABSL_GUARDED_BY(mutex_) = false;       // nothing is read until the queue is shorter
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

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
    events_.closed(refused.ok() ? FromGrpc(status) : refused);
    events_ = {};
  }

 private:
  // What was read. A worker says nothing before it has our proof, which it gets for its own.
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

using control::FollowAnswer;
using control::FollowMessage;
using control::MasterMessage;
using control::WorkerMessage;

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
  arguments.SetMaxReceiveMessageSize(static_cast<int>(kMostWireBytes));
  // A connection of its own: no proxy, and no waiting because another one failed a moment ago.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const bool secure = credentials.channel != nullptr && !address.starts_with("unix:");
  return control::Control::NewStub(grpc::CreateCustomChannel(
      address, secure ? credentials.channel : grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace

class ControlServer::Impl final : public control::Control::CallbackService {
 public:
  explicit Impl(Acceptors acceptors) : acceptors_(std::move(acceptors)) {}
  ~Impl() override {
    if (!server_) return;
    server_->Shutdown(std::chrono::system_clock::now());
    live_.WaitForNone();
  }

  absl::Status Listen(const std::string& listen, const ControlCredentials& credentials) {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.SetMaxReceiveMessageSize(static_cast<int>(kMostWireBytes));
    // A small message could become a large one.
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
    secret_ = credentials.secret;
    const bool secure = credentials.server != nullptr && !listen.starts_with("unix:");
    builder.AddListeningPort(
        listen, secure ? credentials.server : grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (!server_ || port == 0) {
      return absl::UnavailableError(Str("cannot listen on ", listen));
    }
    server_->GetHealthCheckService()->SetServingStatus("", true);
    SetReady(false);
    const size_t colon = listen.rfind(':');
    address_ = listen.starts_with("unix:") ? listen : Str(listen.substr(0, colon), ":", port);
    return absl::OkStatus();
  }
  const std::string& address() const { return address_; }
  void SetReady(bool ready) { server_->GetHealthCheckService()->SetServingStatus("ready", ready); }

  grpc::ServerBidiReactor<MasterMessage, WorkerMessage>* Attach(
      grpc::CallbackServerContext* context) override {
    return Accept<MasterMessage, WorkerMessage>(*context, acceptors_.attach, "Attach");
  }
  grpc::ServerBidiReactor<FollowMessage, FollowAnswer>* Follow(
      grpc::CallbackServerContext* context) override {
    return Accept<FollowMessage, FollowAnswer>(*context, acceptors_.follow, "Follow");
  }

 private:
  template <typename In, typename Out, typename Acceptor>
  grpc::ServerBidiReactor<In, Out>* Accept(grpc::CallbackServerContext& context,
                                           const Acceptor& acceptor, const char* call) {
    auto stream = std::make_shared<ServerStream<In, Out>>(context, live_);
    stream->Begin(acceptor(stream), secret_, call);
    return stream.get();
  }

  const Acceptors acceptors_;
  std::string address_;
  std::string secret_;  // constant once it listens
  LiveStreams live_;
  std::unique_ptr<grpc::Server> server_;
};

ControlServer::ControlServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ControlServer::~ControlServer() = default;

const std::string& ControlServer::address() const { return impl_->address(); }
void ControlServer::SetReady(bool ready) { impl_->SetReady(ready); }

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(
    const std::string& listen, Acceptors acceptors, const ControlCredentials& credentials) {
  auto impl = std::make_unique<Impl>(std::move(acceptors));
  TREADLE_RETURN_IF_ERROR(impl->Listen(listen, credentials));
  return std::unique_ptr<ControlServer>(new ControlServer(std::move(impl)));
}

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

}  // namespace treadle
