#include "tests/support/faults/fault_proxy.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/sync.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_streams.h"

namespace treadle {
namespace {

// The faults that are yet to happen.
class FaultList {
 public:
  void Add(const MessageFault& fault) {
    MutexLock lock(mutex_);
    faults_.push_back(fault);
  }
  std::optional<MessageFault> Take(MessageFault::Where where, const std::string& message) {
    MutexLock lock(mutex_);
    for (size_t i = 0; i < faults_.size(); ++i) {
      if (faults_[i].where != where || faults_[i].message != message) continue;
      if (faults_[i].skip-- > 0) continue;
      const MessageFault fault = faults_[i];
      faults_.erase(faults_.begin() + static_cast<std::ptrdiff_t>(i));
      ++happened_;
      return fault;
    }
    return std::nullopt;
  }
  int happened() const {
    MutexLock lock(mutex_);
    return happened_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<MessageFault> faults_ ABSL_GUARDED_BY(mutex_);
  int happened_ ABSL_GUARDED_BY(mutex_) = 0;
};

const google::protobuf::FieldDescriptor* FieldSet(const google::protobuf::Message& message) {
  const auto* oneof = message.GetDescriptor()->oneof_decl_count() > 0
                          ? message.GetDescriptor()->oneof_decl(0)
                          : nullptr;
  return oneof == nullptr ? nullptr
                          : message.GetReflection()->GetOneofFieldDescriptor(message, oneof);
}

std::string NameOf(const google::protobuf::Message& message) {
  const auto* field = FieldSet(message);
  return field == nullptr ? "answer" : field->name();
}

// Takes the last entry from the first array that has one, or everything if there is no array.
void Truncate(google::protobuf::Message& message) {
  const auto* field = FieldSet(message);
  google::protobuf::Message* inner =
      field == nullptr ? &message : message.GetReflection()->MutableMessage(&message, field);
  for (int i = 0; i < inner->GetDescriptor()->field_count(); ++i) {
    const auto* array = inner->GetDescriptor()->field(i);
    if (!array->is_repeated() || inner->GetReflection()->FieldSize(*inner, array) == 0) continue;
    inner->GetReflection()->RemoveLast(inner, array);
    return;
  }
  inner->Clear();
}

// One direction of a stream: passes messages on from a thread of its own.
template <typename Message>
class Lane {
 public:
  Lane(FaultList& faults, MessageFault::Where where) : faults_(faults), where_(where) {}

  void SetTarget(std::shared_ptr<Stream<Message>> target) { target_ = std::move(target); }
  // False if the connection breaks here.
  bool Pass(const Message& message) {
    const std::optional<MessageFault> fault = faults_.Take(where_, NameOf(message));
    if (fault && fault->kind == MessageFault::Kind::kCut) return false;
    tasks_.Post([this, fault, copy = Message(message)]() mutable { Forward(fault, copy); });
    return true;
  }
  void Close(const absl::Status& status) {
    tasks_.Post([this, status] { target_->Close(status); });
  }
  void Abort() { target_->Abort(); }

 private:
  void Forward(const std::optional<MessageFault>& fault, Message& message) {
    const auto is = [&](MessageFault::Kind kind) { return fault && fault->kind == kind; };
    if (is(MessageFault::Kind::kDrop)) return;
    if (is(MessageFault::Kind::kDelay)) std::this_thread::sleep_for(fault->delay);
    if (is(MessageFault::Kind::kTruncate)) Truncate(message);
    if (is(MessageFault::Kind::kDuplicate)) target_->Send(Message(message));
    if (is(MessageFault::Kind::kReorder)) {
      held_ = std::move(message);
      return;
    }
    const bool swap = held_ && NameOf(*held_) == NameOf(message);
    target_->Send(std::move(message));
    if (swap) target_->Send(std::move(*std::exchange(held_, std::nullopt)));
  }

  FaultList& faults_;
  const MessageFault::Where where_;
  std::shared_ptr<Stream<Message>> target_;
  std::optional<Message> held_;  // the tasks' own
  TaskThread tasks_;             // last
};

// A client's stream and the worker's, joined. Events hold it until both are closed.
template <typename ToWorker, typename FromWorker>
struct Joint : std::enable_shared_from_this<Joint<ToWorker, FromWorker>> {
  explicit Joint(std::shared_ptr<FaultList> list)
      : faults(std::move(list)),
        to_worker(*faults, MessageFault::Where::kToWorker),
        from_worker(*faults, MessageFault::Where::kFromWorker) {}

  void Cut() {
    to_worker.Abort();
    from_worker.Abort();
  }
  template <typename Open>
  StreamEvents<ToWorker> Begin(std::shared_ptr<Stream<FromWorker>> client, Open open) {
    const auto self = this->shared_from_this();
    from_worker.SetTarget(std::move(client));
    to_worker.SetTarget(open(StreamEvents<FromWorker>{
        .message =
            [self](FromWorker& message) {
              if (!self->from_worker.Pass(message)) self->Cut();
            },
        .closed = [self](const absl::Status& status) { self->from_worker.Close(status); }}));
    return {.message =
                [self](ToWorker& message) {
                  if (!self->to_worker.Pass(message)) self->Cut();
                },
            .closed = [self](const absl::Status& status) { self->to_worker.Abort(); }};
  }

  const std::shared_ptr<FaultList> faults;
  Lane<ToWorker> to_worker;
  Lane<FromWorker> from_worker;
};

class Proxy final : public FaultProxy {
 public:
  absl::Status Listen(const std::string& worker) {
    ControlServer::Acceptors acceptors;
    acceptors.attach = [this, worker](auto client) {
      auto joint = std::make_shared<Joint<control::MasterMessage, control::WorkerMessage>>(faults_);
      return joint->Begin(std::move(client),
                          [&](auto events) { return OpenAttach(worker, std::move(events)); });
    };
    acceptors.follow = [this, worker](auto client) {
      auto joint = std::make_shared<Joint<control::FollowMessage, control::FollowAnswer>>(faults_);
      return joint->Begin(std::move(client),
                          [&](auto events) { return OpenFollow(worker, std::move(events)); });
    };
    acceptors.train = [this, worker](auto client) {
      auto joint = std::make_shared<Joint<control::TrainRequest, control::TrainAnswer>>(faults_);
      return joint->Begin(std::move(client),
                          [&](auto events) { return OpenTrain(worker, std::move(events)); });
    };
    auto server = ControlServer::Start("127.0.0.1:0", std::move(acceptors));
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    return absl::OkStatus();
  }

  const std::string& address() const override { return server_->address(); }
  void Inject(const MessageFault& fault) override { faults_->Add(fault); }
  int happened() const override { return faults_->happened(); }

 private:
  const std::shared_ptr<FaultList> faults_ = std::make_shared<FaultList>();
  std::unique_ptr<ControlServer> server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<FaultProxy>> FaultProxy::Start(const std::string& worker) {
  auto proxy = std::make_unique<Proxy>();
  const absl::Status listening = proxy->Listen(worker);
  if (!listening.ok()) return listening;
  return proxy;
}

}  // namespace treadle
