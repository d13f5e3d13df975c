// The serving loop's side of an Engine, for tests.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "base/sync.h"
#include "engine/engine.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/engine/plan_driver.h"

namespace treadle {

// The serving loop's side of an engine whose epochs may end. Every wait is bounded.
class EngineClient {
 public:
  explicit EngineClient(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {
    const absl::Status started = engine_->Start([this] {
      MutexLock lock(mutex_);
      news_ = true;
      changed_.NotifyAll();
    });
    TREADLE_CHECK(started.ok());
  }

  Engine& engine() { return *engine_; }

  // Until the engine has called wake since the last wait; false if it does not.
  bool WaitForNews() {
    MutexLock lock(mutex_);
    // In seconds: an iteration on an emulated GPU can take a minute under a sanitizer.
    constexpr int kPatience = kInstrumented ? 600 : 60;
    for (int seconds = 0; !news_; ++seconds) {
      if (seconds == kPatience) return false;
      changed_.WaitUntil(mutex_, std::chrono::steady_clock::now() + std::chrono::seconds(1));
    }
    news_ = false;
    return true;
  }
  // Until `done`, or the epoch's error, or DeadlineExceeded.
  template <typename Done>
  absl::Status WaitUntil(Done done) {
    // In short waits: a machine that stands still for a while costs one of them.
    for (int waits = 0; !done(); ++waits) {
      TREADLE_RETURN_IF_ERROR(engine_->status());
      if (waits > 10'000) return absl::DeadlineExceededError("too much news, and nothing done");
      if (!WaitForNews()) return absl::DeadlineExceededError("no news");
    }
    return absl::OkStatus();
  }
  absl::Status WaitForRoom() {
    return WaitUntil([&] { return engine_->HasRoom(); });
  }
  // The epoch's error.
  absl::Status WaitForError() {
    return WaitUntil([] { return false; });
  }
  absl::StatusOr<IterationResult> Next() {
    TREADLE_RETURN_IF_ERROR(WaitUntil([&] {
      for (IterationResult& result : engine_->TakeResults()) ready_.push_back(std::move(result));
      return !ready_.empty();
    }));
    IterationResult result = std::move(ready_.front());
    ready_.pop_front();
    return result;
  }
  // Runs the driver's requests to their end, or to the end of the epoch.
  absl::Status Run(PlanDriver& driver) {
    uint64_t submitted = 0;
    uint64_t absorbed = 0;
    TREADLE_RETURN_IF_ERROR(WaitForRoom());
    while (!driver.Done() || absorbed < submitted) {
      while (!driver.Done() && engine_->HasRoom()) {
        engine_->Submit(driver.Next(engine_->epoch(), submitted++));
      }
      TREADLE_ASSIGN_OR_RETURN(const IterationResult result, Next());
      driver.Absorb(result);
      ++absorbed;
    }
    return absl::OkStatus();
  }
  // Begins epochs until one stands.
  absl::Status Recover(int attempts = 20) {
    absl::Status status;
    for (int i = 0; i < attempts; ++i) {
      ready_.clear();
      engine_->Restart();
      status = WaitForRoom();
      if (status.ok()) return status;
    }
    return status;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<IterationResult> ready_;
  std::unique_ptr<Engine> engine_;  // last: its threads call wake until it is gone
};

// The same where an epoch ends only when the test wants it: else the program ends.
class EngineRunner : public EngineClient {
 public:
  using EngineClient::EngineClient;

  void WaitForRoom() { TREADLE_CHECK(EngineClient::WaitForRoom().ok()); }
  void WaitForError() { EngineClient::WaitForError().IgnoreError(); }
  IterationResult Next() { return EngineClient::Next().value(); }
  void RunAll(PlanDriver& driver) { TREADLE_CHECK(Run(driver).ok()); }
};

}  // namespace treadle
