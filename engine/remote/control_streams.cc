#include "engine/remote/control_streams.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <deque>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/remote/control.grpc.pb.h"

namespace treadle {
namespace {

constexpr int kMaxMessageBytes = 256 << 20;  // of a large model's directory of tensors

grpc::Status ToGrpc(const absl::Status& status) {
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}
absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

// Counts the streams of a server, so that it can wait for the last.
class LiveStreams {
 public:
  void Add() {
    MutexLock lock(mutex_);
    ++live_;
  }
  void Remove() {
    MutexLock lock(mutex_);
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
};

// The server's end. It keeps itself alive until OnDone; afterwards whoever holds it may still call.
template <typename In, typename Out>
class ServerStream final : public grpc::ServerBidiReactor<In, Out>,
                           public Stream<Out>,
                           public std::enable_shared_from_this<ServerStream<In, Out>> {
 public:
  ServerStream(grpc::CallbackServerContext& context, LiveStreams& live)
      : context_(context), live_(live) {
    live_.Add();
  }

  void Begin(StreamEvents<In> events) {
    events_ = std::move(events);
    MutexLock lock(mutex_);
    self_ = this->shared_from_this();
    this->StartRead(&in_);
  }

  void Send(Out&& message) override {
    MutexLock lock(mutex_);
    if (closing_) return;
    queue_.push_back(std::move(message));
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
    events_.message(in_);
    MutexLock lock(mutex_);
    if (!finished_) this->StartRead(&in_);
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    queue_.pop_front();
    if (!ok) Break();
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
    live_.Remove();
  }

 private:
  void Break() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    broken_ = closing_ = true;
    while (queue_.size() > (writing_ ? 1 : 0)) queue_.pop_back();
  }
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || writing_) return;
    if (!queue_.empty()) {
      writing_ = true;
      this->StartWrite(&queue_.front());
    } else if (closing_) {
      finished_ = true;
      this->Finish(ToGrpc(status_));
    }
  }

  grpc::CallbackServerContext& context_;  // until done_
  LiveStreams& live_;                     // until OnDone returns
  StreamEvents<In> events_;               // confined to gRPC's callbacks after Begin
  In in_;                                 // likewise

  Mutex mutex_;
  std::shared_ptr<ServerStream> self_ ABSL_GUARDED_BY(mutex_);
  std::deque<Out> queue_ ABSL_GUARDED_BY(mutex_);  // the first is being written if writing_
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

  // `call` begins the call with this context and reactor.
  template <typename Call>
  void Begin(Call call) {
    MutexLock lock(mutex_);
    self_ = this->shared_from_this();
    call(&context_, this);
    this->AddHold();
    this->StartRead(&in_);
    this->StartCall();
  }

  void Send(Out&& message) override {
    MutexLock lock(mutex_);
    if (closing_) return;
    queue_.push_back(std::move(message));
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

  void OnReadDone(bool ok) override {
    if (ok) {
      events_.message(in_);
      this->StartRead(&in_);
      return;
    }
    MutexLock lock(mutex_);
    ended_ = closing_ = true;
    while (queue_.size() > (writing_ ? 1 : 0)) queue_.pop_back();
    Advance();
  }
  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    queue_.pop_front();
    if (!ok) {
      closing_ = true;
      queue_.clear();
    }
    Advance();
  }
  void OnDone(const grpc::Status& status) override {
    std::shared_ptr<ClientStream> last;
    {
      MutexLock lock(mutex_);
      done_ = true;
      last = std::move(self_);
    }
    events_.closed(FromGrpc(status));
    events_ = {};
  }

 private:
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    if (!queue_.empty()) {
      writing_ = true;
      this->StartWrite(&queue_.front());
    } else if (ended_) {
      if (!std::exchange(released_, true)) this->RemoveHold();
    } else if (closing_ && !std::exchange(said_done_, true)) {
      this->StartWritesDone();
    }
  }

  StreamEvents<In> events_;  // confined to gRPC's callbacks
  In in_;                    // likewise
  grpc::ClientContext context_;

  Mutex mutex_;
  std::shared_ptr<ClientStream> self_ ABSL_GUARDED_BY(mutex_);
  std::deque<Out> queue_ ABSL_GUARDED_BY(mutex_);
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
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
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
    builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
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
    return Accept<MasterMessage, WorkerMessage>(*context, acceptors_.attach);
  }
  grpc::ServerBidiReactor<FollowMessage, FollowAnswer>* Follow(
      grpc::CallbackServerContext* context) override {
    return Accept<FollowMessage, FollowAnswer>(*context, acceptors_.follow);
  }

 private:
  template <typename In, typename Out, typename Acceptor>
  grpc::ServerBidiReactor<In, Out>* Accept(grpc::CallbackServerContext& context,
                                           const Acceptor& acceptor) {
    auto stream = std::make_shared<ServerStream<In, Out>>(context, live_);
    stream->Begin(acceptor(stream));
    return stream.get();
  }

  const Acceptors acceptors_;
  std::string address_;
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
  stream->Begin([&](auto* context, auto* reactor) { stub->async()->Attach(context, reactor); });
  return stream;
}

std::shared_ptr<Stream<FollowMessage>> OpenFollow(const std::string& address,
                                                  StreamEvents<FollowAnswer> events,
                                                  const ControlCredentials& credentials) {
  const auto stub = Connect(address, credentials);
  auto stream = std::make_shared<ClientStream<FollowMessage, FollowAnswer>>(std::move(events));
  stream->Begin([&](auto* context, auto* reactor) { stub->async()->Follow(context, reactor); });
  return stream;
}

}  // namespace treadle
