// One master's attachment to a worker. Thread safety: sends from any thread; the rest is constant
// once the master has said hello.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "engine/remote/control_streams.h"

namespace treadle {

struct Session {
  std::shared_ptr<Stream<control::WorkerMessage>> stream;
  uint64_t master = 0;
  std::chrono::milliseconds silence{0};
  std::chrono::milliseconds heartbeat{0};
  bool weights_from_master = false;

  void Send(control::WorkerMessage&& message);
  // With epoch 0: while loading.
  void Fail(uint64_t epoch, const absl::Status& status);
};
using SessionPointer = std::shared_ptr<Session>;

// That an epoch, or with 0 the loading, has failed.
control::WorkerMessage FailureOf(uint64_t epoch, const absl::Status& why);

}  // namespace treadle
