#include "kernels/cpu/thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/status.h"

namespace treadle {
namespace {

// Long enough to bridge the gaps between the ops of one iteration, short enough that a thread whose
// partner lost its core soon gives its own away.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr int kPausesPerLook = 32;
// All exceptions masked, round to nearest, denormals kept.
constexpr unsigned kFloatMode = 0x1f80;

// Returns once `value` differs from `old`: spins for kSpin if `may_spin`, then sleeps on the futex
// behind std::atomic. Whoever changes the value calls notify.
void WaitWhileEqual(const std::atomic<uint32_t>& value, uint32_t old, bool may_spin) {
  if (!may_spin) {
    value.wait(old, std::memory_order_acquire);
    return;
  }
  for (int i = 0; i < kPausesPerLook; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  const auto give_up = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      _mm_pause();
    }
  } while (std::chrono::steady_clock::now() < give_up);
  value.wait(old, std::memory_order_acquire);
}

std::vector<int> AllowedCpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

void PinThisThread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // A refusal only costs speed.
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

}  // namespace

int UsableCpus() {
  const size_t cpus = AllowedCpus().size();
  return cpus > 0 ? static_cast<int>(cpus) : 1;
}

struct ThreadPool::State {
  // Constant while a task runs; published by `generation`.
  Task task = nullptr;
  void* context = nullptr;
  bool stop = false;

  // Constant. More threads than processors: whoever spins keeps another from working.
  bool may_spin = true;

  // Confined to the thread that calls Run.
  std::vector<std::thread> workers;
  std::vector<int> cpus;  // to pin to; empty: not pinned
  bool caller_pinned = false;

  alignas(64) std::atomic<uint32_t> generation = 0;  // counts tasks
  alignas(64) std::atomic<uint32_t> running = 0;     // workers that have not finished the task
  alignas(64) std::atomic<uint32_t> arrived = 0;     // threads in the barrier
  alignas(64) std::atomic<uint32_t> phase = 0;       // counts completed barriers

  void Work(int worker);
};

void ThreadPool::State::Work(int worker) {
  if (!cpus.empty()) PinThisThread(cpus[worker % cpus.size()]);
  _mm_setcsr(kFloatMode);
  for (uint32_t seen = 0;; ++seen) {
    WaitWhileEqual(generation, seen, may_spin);
    if (stop) return;
    task(context, worker);
    if (running.fetch_sub(1, std::memory_order_acq_rel) == 1) running.notify_one();
  }
}

ThreadPool::ThreadPool(int threads, bool pin) : size_(threads), state_(std::make_unique<State>()) {
  TREADLE_CHECK(threads >= 1);
  std::vector<int> cpus = AllowedCpus();
  state_->may_spin = cpus.empty() || static_cast<size_t>(threads) <= cpus.size();
  if (pin) state_->cpus = std::move(cpus);
  for (int worker = 1; worker < threads; ++worker) {
    state_->workers.emplace_back([state = state_.get(), worker] { state->Work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  state_->stop = true;
  state_->generation.fetch_add(1, std::memory_order_release);
  state_->generation.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::RunTask(Task task, void* context) {
  State& state = *state_;
  if (!state.caller_pinned) {
    if (!state.cpus.empty()) PinThisThread(state.cpus[0]);
    state.caller_pinned = true;
  }
  if (_mm_getcsr() != kFloatMode) _mm_setcsr(kFloatMode);
  if (size_ == 1) {
    task(context, 0);
    return;
  }
  state.task = task;
  state.context = context;
  state.running.store(static_cast<uint32_t>(size_ - 1), std::memory_order_relaxed);
  state.generation.fetch_add(1, std::memory_order_release);
  state.generation.notify_all();
  task(context, 0);
  for (;;) {
    const uint32_t running = state.running.load(std::memory_order_acquire);
    if (running == 0) return;
    WaitWhileEqual(state.running, running, state.may_spin);
  }
}

void ThreadPool::Barrier() {
  if (size_ == 1) return;
  State& state = *state_;
  const uint32_t phase = state.phase.load(std::memory_order_acquire);
  if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(size_)) {
    state.arrived.store(0, std::memory_order_relaxed);
    state.phase.fetch_add(1, std::memory_order_release);
    state.phase.notify_all();
    return;
  }
  WaitWhileEqual(state.phase, phase, state.may_spin);
}

}  // namespace treadle
