#include "scheduler/serving_loop.h"

#include <system_error>
#include <utility>

#include "base/status.h"

namespace treadle {

ServingLoop::ServingLoop(Engine& engine, KvSlotManager& kv, RequestPool& pool, Policy& policy,
                         Ledger& ledger, const TimeSource& time, const Options& options)
    : engine_(engine),
      pool_(pool),
      bell_(std::make_shared<Bell>(&pool)),
      core_(engine, kv, pool, policy, ledger, time, options) {}

ServingLoop::~ServingLoop() { Stop(absl::UnavailableError("the server is stopping")); }

absl::Status ServingLoop::Start(const std::function<void(LoopCore&)>& measure) {
  TREADLE_CHECK(!stopped_ && !thread_.joinable());
  TREADLE_RETURN_IF_ERROR(engine_.Start([bell = bell_] { bell->Ring(); }));
  if (measure) measure(core_);
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("serving loop's thread: ", error.what());
  }
  return absl::OkStatus();
}

void ServingLoop::Run() {
  while (true) {
    core_.Wait();
    if (stopping_.load()) return;
    core_.Turn();
    engine_stands_.store(core_.engine_stands(), std::memory_order_relaxed);
    turns_.fetch_add(1, std::memory_order_relaxed);
    if (core_.drained()) NoteDrained();
  }
}

void ServingLoop::NoteDrained() {
  MutexLock lock(mutex_);
  if (std::exchange(drained_, true)) return;
  drained_changed_.NotifyAll();
}

void ServingLoop::Stop(absl::Status status) {
  if (std::exchange(stopped_, true)) return;
  pool_.Drain();  // nothing is accepted that nobody would serve
  stopping_.store(true);
  pool_.Wake();
  if (thread_.joinable()) thread_.join();
  bell_->Silence();
  core_.EndAll(status);
  NoteDrained();
}

bool ServingLoop::WaitDrained(Clock::time_point deadline) {
  MutexLock lock(mutex_);
  while (!drained_) {
    if (!drained_changed_.WaitUntil(mutex_, deadline)) return drained_;
  }
  return true;
}

}  // namespace treadle
