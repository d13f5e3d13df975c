#include "tests/fuzz/fake_control_streams.h"

#include "absl/synchronization/notification.h"
#include "base/background.h"

namespace treadle {
namespace {

// Opened streams, and who listens.
struct Network {
  TaskThread events;
  Mutex mutex;
  std::vector<std::shared_ptr<MasterEnd>> attached ABSL_GUARDED_BY(mutex);
  std::vector<std::shared_ptr<FollowerEnd>> followers ABSL_GUARDED_BY(mutex);
  ControlServer::Acceptors acceptors ABSL_GUARDED_BY(mutex);
  std::vector<std::function<void()>> aborts ABSL_GUARDED_BY(mutex);  // of streams to the server
};
Network& TheNetwork() {
  static Network& network = *new Network;
  return network;
}

ControlServer::Acceptors Acceptors() {
  MutexLock lock(TheNetwork().mutex);
  return TheNetwork().acceptors;
}

template <typename End, typename Accept>
std::shared_ptr<End> OpenToServer(const Accept& accept) {
  const auto stream = std::make_shared<End>();
  OnEventThread([&] { stream->SetEvents(accept(stream)); });
  MutexLock lock(TheNetwork().mutex);
  TheNetwork().aborts.push_back([stream] { stream->Abort(); });
  return stream;
}

}  // namespace

void PostEvent(std::function<void()> work) { TheNetwork().events.Post(std::move(work)); }

void OnEventThread(const std::function<void()>& work) {
  absl::Notification done;
  PostEvent([&] {
    work();
    done.Notify();
  });
  done.WaitForNotification();
}

std::vector<std::shared_ptr<MasterEnd>> TakeAttached() {
  MutexLock lock(TheNetwork().mutex);
  return std::exchange(TheNetwork().attached, {});
}

std::vector<std::shared_ptr<FollowerEnd>> TakeFollowers() {
  MutexLock lock(TheNetwork().mutex);
  return std::exchange(TheNetwork().followers, {});
}

std::shared_ptr<WorkerEnd> AttachToServer() { return OpenToServer<WorkerEnd>(Acceptors().attach); }
std::shared_ptr<FollowedEnd> FollowServer() {
  return OpenToServer<FollowedEnd>(Acceptors().follow);
}

std::shared_ptr<Stream<control::MasterMessage>> OpenAttach(
    const std::string&, StreamEvents<control::WorkerMessage> events, const ControlCredentials&) {
  const auto stream = std::make_shared<MasterEnd>();
  stream->SetEvents(std::move(events));
  MutexLock lock(TheNetwork().mutex);
  return TheNetwork().attached.emplace_back(stream);
}

std::shared_ptr<Stream<control::FollowMessage>> OpenFollow(
    const std::string&, StreamEvents<control::FollowAnswer> events, const ControlCredentials&) {
  const auto stream = std::make_shared<FollowerEnd>();
  stream->SetEvents(std::move(events));
  MutexLock lock(TheNetwork().mutex);
  return TheNetwork().followers.emplace_back(stream);
}

class ControlServer::State {
 public:
  const std::string address = "nowhere";
};

ControlServer::ControlServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

absl::StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(const std::string&,
                                                                    Acceptors acceptors,
                                                                    const ControlCredentials&) {
  MutexLock lock(TheNetwork().mutex);
  TheNetwork().acceptors = std::move(acceptors);
  return std::unique_ptr<ControlServer>(new ControlServer(std::make_unique<State>()));
}

ControlServer::~ControlServer() {
  std::vector<std::function<void()>> aborts;
  {
    MutexLock lock(TheNetwork().mutex);
    aborts = std::exchange(TheNetwork().aborts, {});
    TheNetwork().acceptors = {};
  }
  for (const auto& abort : aborts) abort();
  OnEventThread([] {});
}

const std::string& ControlServer::address() const { return state_->address; }
void ControlServer::SetReady(bool) {}

}  // namespace treadle
