#include "scheduler/serving_loop.h"

#include <system_error>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "scheduler/loop_core.h"

namespace treadle {
namespace {

class SteadyTime final : public TimeSource {
 public:
  Clock::time_point Now() const override { return Clock::now(); }
};

// What the engine's threads call. It outlives the loop with them, and then wakes nobody.
struct Bell {
  explicit Bell(RequestPool* wakes) : pool(wakes) {}
  void Ring() ABSL_LOCKS_EXCLUDED(mutex) {
    MutexLock lock(mutex);
    if (pool != nullptr) pool->Wake();
  }
  void Silence() ABSL_LOCKS_EXCLUDED(mutex) {
    MutexLock lock(mutex);
    pool = nullptr;
  }

  Mutex mutex;
  RequestPool* pool ABSL_GUARDED_BY(mutex);
};

}  // namespace

const TimeSource& TimeSource::Steady() {
  static const SteadyTime steady;
  return steady;
}

struct ServingLoop::State {
  State(Engine& engine, KvSlotManager& kv, RequestPool& pool, const Policy& policy, Ledger& ledger,
        const TimeSource& time, const Options& options)
      : engine(engine),
        pool(pool),
        bell(std::make_shared<Bell>(&pool)),
        core(engine, kv, pool, policy, ledger, time, options) {}

  void Run();
  void NoteDrained();

  // Constant.
  Engine& engine;
  RequestPool& pool;
  const std::shared_ptr<Bell> bell;

  std::atomic<bool> stopping{false};
  std::atomic<uint64_t> turns{0};
  std::atomic<bool> engine_stands{false};

  Mutex mutex;
  CondVar drained_changed;
  bool drained ABSL_GUARDED_BY(mutex) = false;

  // Confined to the loop's thread while it runs, to the owner's before and after.
  LoopCore core;

  // Confined to the owner's thread.
  bool stopped = false;
  std::thread thread;
};

void ServingLoop::State::Run() {
  while (true) {
    core.Wait();
    if (stopping.load()) return;
    core.Turn();
    engine_stands.store(core.engine_stands(), std::memory_order_relaxed);
    turns.fetch_add(1, std::memory_order_relaxed);
    if (core.drained()) NoteDrained();
  }
}

void ServingLoop::State::NoteDrained() {
  MutexLock lock(mutex);
  if (std::exchange(drained, true)) return;
  drained_changed.NotifyAll();
}

ServingLoop::ServingLoop(Engine& engine, KvSlotManager& kv, RequestPool& pool, const Policy& policy,
                         Ledger& ledger, const TimeSource& time, const Options& options)
    : state_(std::make_unique<State>(engine, kv, pool, policy, ledger, time, options)) {}

ServingLoop::~ServingLoop() { Stop(absl::UnavailableError("the server is stopping")); }

absl::Status ServingLoop::Start() {
  State& state = *state_;
  TREADLE_CHECK(!state.stopped && !state.thread.joinable());
  TREADLE_RETURN_IF_ERROR(state.engine.Start([bell = state.bell] { bell->Ring(); }));
  try {
    state.thread = std::thread([&state] { state.Run(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("serving loop's thread: ", error.what());
  }
  return absl::OkStatus();
}

void ServingLoop::Stop(absl::Status status) {
  State& state = *state_;
  if (std::exchange(state.stopped, true)) return;
  state.pool.Drain();  // nothing is accepted that nobody would serve
  state.stopping.store(true);
  state.pool.Wake();
  if (state.thread.joinable()) state.thread.join();
  state.bell->Silence();
  state.core.EndAll(status);
  state.NoteDrained();
}

bool ServingLoop::WaitDrained(Clock::time_point deadline) {
  State& state = *state_;
  MutexLock lock(state.mutex);
  while (!state.drained) {
    if (!state.drained_changed.WaitUntil(state.mutex, deadline)) return state.drained;
  }
  return true;
}

uint64_t ServingLoop::turns() const { return state_->turns.load(std::memory_order_relaxed); }

bool ServingLoop::engine_stands() const {
  return state_->engine_stands.load(std::memory_order_relaxed);
}

}  // namespace treadle
