// Peers for tests of the control plane that speak for one end of a stream.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/sync.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/control_streams.h"
#include "tests/engine/remote/driven_requests.h"

namespace treadle {

inline constexpr std::chrono::seconds kPatience(kInstrumented ? 60 : 20);

inline std::string TinyModel() {
  TinyModelOptions options;
  options.layers = 2;
  return *WriteTinyLlamaGguf(OwnFolder().path(), options);
}

// Messages that came on a stream, in order.
template <typename Message>
class Inbox {
 public:
  StreamEvents<Message> Events() {
    return {.message =
                [this](Message& message) {
                  MutexLock lock(mutex_);
                  messages_.push_back(std::move(message));
                  changed_.NotifyAll();
                },
            .closed =
                [this](const absl::Status& status) {
                  MutexLock lock(mutex_);
                  closed_ = status;
                  changed_.NotifyAll();
                }};
  }
  // The next one that is `wanted`; nothing if the stream has ended, or nothing comes.
  template <typename Wanted>
  std::optional<Message> Next(const Wanted& wanted) {
    const auto late = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (true) {
      while (!messages_.empty()) {
        Message message = std::move(messages_.front());
        messages_.pop_front();
        if (wanted(message)) return message;
      }
      if (closed_ || !changed_.WaitUntil(mutex_, late)) return std::nullopt;
    }
  }
  // Why the stream ended; nothing if it has not.
  std::optional<absl::Status> Closed(std::chrono::seconds patience = kPatience) {
    const auto late = std::chrono::steady_clock::now() + patience;
    MutexLock lock(mutex_);
    while (!closed_ && changed_.WaitUntil(mutex_, late)) {
    }
    return closed_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<Message> messages_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> closed_ ABSL_GUARDED_BY(mutex_);
};

// A master that sends what a test tells it to.
class HostileMaster {
 public:
  explicit HostileMaster(const std::string& address, const ControlCredentials& credentials = {})
      : stream_(OpenAttach(address, inbox_.Events(), credentials)) {}
  ~HostileMaster() {
    stream_->Abort();
    inbox_.Closed();
  }

  template <typename Fill>
  void Tell(const Fill& fill) {
    stream_->Tell(fill);
  }
  bool Hello() {
    Tell([](control::MasterMessage& message) {
      control::MasterHello& hello = *message.mutable_hello();
      hello.set_protocol(kControlProtocol);
      hello.set_version("test");
      hello.set_master(1);
      hello.set_silence_ms(60'000);
      hello.set_heartbeat_ms(1000);
    });
    return inbox_.Next([](const auto& message) { return message.has_hello(); }).has_value();
  }
  // Why the worker cannot do what it was last told.
  std::string Failure() {
    const auto failed = inbox_.Next([](const auto& message) { return message.has_failed(); });
    return failed ? failed->failed().message() : "";
  }
  Inbox<control::WorkerMessage>& inbox() { return inbox_; }

 private:
  Inbox<control::WorkerMessage> inbox_;
  std::shared_ptr<Stream<control::MasterMessage>> stream_;
};

}  // namespace treadle
