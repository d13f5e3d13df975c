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
#include "engine/remote/control_streams.h"
#include "net/guarded_server.h"

namespace treadle {
namespace {

using control::FollowAnswer;
using control::FollowMessage;
using control::MasterMessage;
using control::TrainAnswer;
using control::TrainRequest;
using control::WorkerMessage;

// Streams of a server that have said nothing yet. A master and a neighbour say hello at once.
constexpr size_t kMaxSilentStreams = 64;

// A master, the stage before and a probe have a connection and a call each. The rest is room for
// strangers to come and go, of whom those in silent streams alone may not fill the house.
constexpr DoorLimits kDoor = {.connections = 256,
                              .per_address = 2 * kMaxSilentStreams,
                              .receiving = 32 << 20,  // pieces of a mebibyte, of one or two peers
                              .request_patience = std::chrono::seconds(10),
                              .http2 = {.message_bytes = kMaxWireBytes,
                                        .header_block_bytes = 16 << 10,
                                        .streams = 16,
                                        .first_message_bytes = kMaxFirstBytes,
                                        .flags = false}};

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
      if (silent_.size() > kMaxSilentStreams) {
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
    // A listener to another call can say this again, and still has to prove the rest.
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
  // Takes the message that was read.
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
      this->Finish({static_cast<grpc::StatusCode>(status_.code()), std::string(status_.message())});
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

}  // namespace

class ControlServer::State final : public control::Control::CallbackService {
 public:
  explicit State(Acceptors acceptors) : acceptors_(std::move(acceptors)) {}
  ~State() override {
    if (guarded_) guarded_->Shutdown(std::chrono::milliseconds(0));
    if (local_) local_->Shutdown(std::chrono::system_clock::now());
    live_.WaitForNone();
  }

  absl::Status Listen(const std::string& listen, const ControlCredentials& credentials) {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.RegisterService(this);
    secret_ = credentials.secret;
    tls_ = credentials.server;
    address_ = listen;
    if (listen.starts_with("unix:")) {
      builder.SetMaxReceiveMessageSize(static_cast<int>(kMaxWireBytes));
      builder.AddListeningPort(listen, grpc::InsecureServerCredentials());
      local_ = builder.BuildAndStart();
      if (!local_) return absl::UnavailableError(Str("cannot listen on ", listen));
    } else {
      TREADLE_ASSIGN_OR_RETURN(guarded_, GuardedServer::Listen(builder, listen, kDoor, tls_.get()));
      address_ = ToString(guarded_->address());
    }
    health().SetServingStatus("", true);
    SetReady(false);
    if (guarded_) guarded_->Open();
    return absl::OkStatus();
  }
  const std::string& address() const { return address_; }
  void SetReady(bool ready) { health().SetServingStatus("ready", ready); }

  grpc::ServerBidiReactor<MasterMessage, WorkerMessage>* Attach(
      grpc::CallbackServerContext* context) override {
    return Accept<MasterMessage, WorkerMessage>(*context, acceptors_.attach, "Attach");
  }
  grpc::ServerBidiReactor<FollowMessage, FollowAnswer>* Follow(
      grpc::CallbackServerContext* context) override {
    return Accept<FollowMessage, FollowAnswer>(*context, acceptors_.follow, "Follow");
  }
  grpc::ServerBidiReactor<TrainRequest, TrainAnswer>* Train(
      grpc::CallbackServerContext* context) override {
    if (!acceptors_.train) return nullptr;  // Unimplemented
    return Accept<TrainRequest, TrainAnswer>(*context, acceptors_.train, "Train");
  }

 private:
  template <typename In, typename Out, typename Acceptor>
  grpc::ServerBidiReactor<In, Out>* Accept(grpc::CallbackServerContext& context,
                                           const Acceptor& acceptor, const char* call) {
    auto stream = std::make_shared<ServerStream<In, Out>>(context, live_);
    stream->Begin(acceptor(stream), secret_, call);
    return stream.get();
  }

  grpc::HealthCheckServiceInterface& health() {
    return *(guarded_ ? guarded_->server() : *local_).GetHealthCheckService();
  }

  const Acceptors acceptors_;
  // Constant once it listens.
  std::string address_;
  std::string secret_;
  std::shared_ptr<const SocketTls> tls_;
  LiveStreams live_;
  // One of them: a socket's permissions are its door.
  std::unique_ptr<grpc::Server> local_;
  std::unique_ptr<GuardedServer> guarded_;
};

ControlServer::ControlServer(std::unique_ptr<State> state) : state_(std::move(state)) {}
ControlServer::~ControlServer() = default;

const std::string& ControlServer::address() const { return state_->address(); }
void ControlServer::SetReady(bool ready) { state_->SetReady(ready); }

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(
    const std::string& listen, Acceptors acceptors, const ControlCredentials& credentials) {
  auto state = std::make_unique<State>(std::move(acceptors));
  TREADLE_RETURN_IF_ERROR(state->Listen(listen, credentials));
  return std::unique_ptr<ControlServer>(new ControlServer(std::move(state)));
}

}  // namespace treadle
