#include "kernels/cpu/thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"

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
  // The task, published by `ticket`. A worker that comes late may read them while the next task is
  // written: what it read is used only if the ticket, which names the task, is still there.
  std::atomic<Task> task = nullptr;
  std::atomic<const void*> context = nullptr;
  std::atomic<int64_t> pieces = 0;
  std::atomic<bool> stop = false;

  // Constant. More threads than processors: whoever spins keeps another from working.
  bool may_spin = true;

  std::vector<int> cpus;  // to pin to, the caller's first; empty: not pinned

  std::vector<std::thread> workers;

  alignas(64) std::atomic<uint32_t> generation = 0;  // counts tasks; what idle workers wait for
  alignas(64) std::atomic<uint64_t> ticket = 0;      // generation << 32 | pieces not yet taken
  alignas(64) std::atomic<uint32_t> pending = 0;     // pieces not yet done

  void Work(int worker);
  void TakePieces(int worker);
};

void ThreadPool::State::Work(int worker) {
  if (!cpus.empty()) PinThisThread(cpus[worker % cpus.size()]);
  _mm_setcsr(kFloatMode);
  for (uint32_t seen = 0;;) {
    WaitWhileEqual(generation, seen, may_spin);
    seen = generation.load(std::memory_order_acquire);
    if (stop.load(std::memory_order_relaxed)) return;
    TakePieces(worker);
  }
}

// Runs pieces until none is left to take. A piece that was taken keeps its task alive.
void ThreadPool::State::TakePieces(int worker) {
  uint64_t seen = ticket.load(std::memory_order_acquire);
  for (;;) {
    const auto left = static_cast<uint32_t>(seen);
    if (left == 0) return;
    const Task run = task.load(std::memory_order_relaxed);
    const void* const argument = context.load(std::memory_order_relaxed);
    const int64_t piece = pieces.load(std::memory_order_relaxed) - left;
    if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      continue;
    }
    run(argument, worker, piece);
    if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) pending.notify_one();
    seen = ticket.load(std::memory_order_acquire);
  }
}

ThreadPool::ThreadPool(int threads, bool pin, int first_cpu)
    : size_(threads), state_(std::make_unique<State>()) {
  TREADLE_CHECK(threads >= 1 && first_cpu >= 0);
  std::vector<int> cpus = AllowedCpus();
  state_->may_spin = cpus.empty() || static_cast<size_t>(first_cpu) + threads <= cpus.size();
  if (pin && !cpus.empty()) {
    std::rotate(cpus.begin(), cpus.begin() + first_cpu % cpus.size(), cpus.end());
    state_->cpus = std::move(cpus);
  }
  for (int worker = 1; worker < threads; ++worker) {
    state_->workers.emplace_back([state = state_.get(), worker] { state->Work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true, std::memory_order_relaxed);
  state_->generation.fetch_add(1, std::memory_order_release);
  state_->generation.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
}

void ThreadPool::PinCaller() {
  if (!state_->cpus.empty()) PinThisThread(state_->cpus[0]);
}

void ThreadPool::RunTask(Task task, const void* context, int64_t pieces) {
  State& state = *state_;
  if (_mm_getcsr() != kFloatMode) _mm_setcsr(kFloatMode);
  if (size_ == 1 || pieces == 1) {
    for (int64_t piece = 0; piece < pieces; ++piece) task(context, 0, piece);
    return;
  }
  TREADLE_CHECK(pieces <= UINT32_MAX);
  state.task.store(task, std::memory_order_relaxed);
  state.context.store(context, std::memory_order_relaxed);
  state.pieces.store(pieces, std::memory_order_relaxed);
  state.pending.store(static_cast<uint32_t>(pieces), std::memory_order_relaxed);
  const uint32_t generation = state.generation.load(std::memory_order_relaxed) + 1;
  state.ticket.store(uint64_t{generation} << 32 | static_cast<uint64_t>(pieces),
                     std::memory_order_release);
  state.generation.store(generation, std::memory_order_release);
  state.generation.notify_all();
  state.TakePieces(0);
  AwaitZero(state.pending);
}

void ThreadPool::AwaitZero(const std::atomic<uint32_t>& value) const {
  while (const uint32_t left = value.load(std::memory_order_acquire)) {
    WaitWhileEqual(value, left, state_->may_spin);
  }
}

}  // namespace treadle
