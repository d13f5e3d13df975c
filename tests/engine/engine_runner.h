// The serving loop's side of an Engine, for tests: waits for its wake-ups, but not for ever.
#pragma once

#include <chrono>
#include <deque>
#include <iostream>
#include <memory>

#include "base/sync.h"
#include "engine/engine.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/engine/plan_driver.h"

namespace treadle {

class EngineRunner {
 public:
  // An iteration on an emulated GPU can take a minute under a sanitizer.
  static constexpr std::chrono::minutes kPatience{kInstrumented ? 10 : 1};

  // Starts the engine.
  explicit EngineRunner(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {
    const absl::Status started = engine_->Start([this] {
      MutexLock lock(mutex_);
      news_ = true;
      changed_.NotifyAll();
    });
    TREADLE_CHECK(started.ok());
  }

  Engine& engine() { return *engine_; }

  // Until the engine has called wake since the last wait.
  void WaitForNews() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (!news_) TREADLE_CHECK(changed_.WaitUntil(mutex_, deadline));
    news_ = false;
  }
  void WaitForRoom() {
    while (!engine_->HasRoom()) WaitForNews();
  }
  void WaitForError() {
    while (engine_->status().ok()) WaitForNews();
  }
  // The next result; the epoch must not end before it comes.
  IterationResult Next() {
    while (ready_.empty()) {
      for (IterationResult& result : engine_->TakeResults()) ready_.push_back(std::move(result));
      if (!ready_.empty()) break;
      if (!engine_->status().ok()) std::cerr << engine_->status() << std::endl;
      TREADLE_CHECK(engine_->status().ok());
      WaitForNews();
    }
    IterationResult result = std::move(ready_.front());
    ready_.pop_front();
    return result;
  }
  // Runs the driver's requests to their end, with as many plans in flight as the engine takes.
  void RunAll(PlanDriver& driver) {
    uint64_t submitted = 0;
    uint64_t absorbed = 0;
    while (!driver.Done() || absorbed < submitted) {
      while (!driver.Done() && engine_->HasRoom()) {
        engine_->Submit(driver.Next(engine_->epoch(), submitted++));
      }
      driver.Absorb(Next());
      ++absorbed;
    }
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<IterationResult> ready_;
  std::unique_ptr<Engine> engine_;  // last: its threads call wake until it is gone
};

}  // namespace treadle
