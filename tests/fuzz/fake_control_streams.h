// Streams of the control plane without gRPC: what a worker or a master opens and accepts goes
// through here (engine/remote/control_streams.h), in a program that is linked with this source.
//
// Thread safety: any thread. Events come on one thread, which `Deliver` waits for.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_boxes.h"
#include "engine/remote/control_streams.h"

namespace treadle {

// Runs `work` on the thread of events, and waits until it, and all before it, was done.
void OnEventThread(const std::function<void()>& work);
void PostEvent(std::function<void()> work);

// One end: what it sends is kept, what it is to hear is delivered.
template <typename Out, typename In>
class FakeStream final : public Stream<Out>,
                         public std::enable_shared_from_this<FakeStream<Out, In>> {
 public:
  void SetEvents(StreamEvents<In> events) { events_ = std::move(events); }

  void Send(Out&& message) override {
    MutexLock lock(mutex_);
    if (!ended_) sent_.push_back(std::move(message));
    changed_.NotifyAll();
  }
  void Close(absl::Status status) override { End(std::move(status)); }
  void Abort() override { End(absl::CancelledError("aborted")); }

  // A message of the other end, as bytes; what is too large, or out of place, ends the stream.
  void Deliver(std::string_view bytes) {
    OnEventThread([&] {
      In message;
      if (over_ || !message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
      const absl::StatusOr<bool> whole = inbox_.Take(message);
      if (!whole.ok()) return End(whole.status());
      if (*whole) events_.message(message);
    });
  }
  // Its events' `closed` comes once, later.
  void End(absl::Status why) {
    {
      MutexLock lock(mutex_);
      changed_.NotifyAll();
      if (std::exchange(ended_, true)) return;
    }
    PostEvent([self = this->shared_from_this(), why = std::move(why)] {
      self->over_ = true;
      if (self->events_.closed) self->events_.closed(why);
      self->events_ = {};
    });
  }
  // The next message that this end sent; nothing if none came for so long, or the stream has ended.
  bool Next(Out& message, std::chrono::milliseconds patience) {
    const auto late = std::chrono::steady_clock::now() + patience;
    MutexLock lock(mutex_);
    while (taken_ == sent_.size()) {
      if (ended_ || !changed_.WaitUntil(mutex_, late)) return false;
    }
    message = sent_[taken_++];
    return true;
  }

 private:
  StreamEvents<In> events_;  // of the thread of events
  ControlInbox<In> inbox_;
  bool over_ = false;

  Mutex mutex_;
  CondVar changed_;
  std::vector<Out> sent_ ABSL_GUARDED_BY(mutex_);
  size_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

using MasterEnd = FakeStream<control::MasterMessage, control::WorkerMessage>;
using WorkerEnd = FakeStream<control::WorkerMessage, control::MasterMessage>;
using FollowerEnd = FakeStream<control::FollowMessage, control::FollowAnswer>;
using FollowedEnd = FakeStream<control::FollowAnswer, control::FollowMessage>;

// Streams that the code under test has opened since the last call, in order.
std::vector<std::shared_ptr<MasterEnd>> TakeAttached();
std::vector<std::shared_ptr<FollowerEnd>> TakeFollowers();
// A stream to the server that was started last.
std::shared_ptr<WorkerEnd> AttachToServer();
std::shared_ptr<FollowedEnd> FollowServer();

}  // namespace treadle
