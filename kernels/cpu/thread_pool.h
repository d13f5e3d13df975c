// The threads of one rank: the caller and size() - 1 pinned workers that run one task together.
//
// Between tasks workers spin for a bounded time, then sleep on a futex, so an idle server costs no
// CPU, and a core that is taken away delays only what runs on it. All threads use the same rounding
// and denormal mode (round to nearest, denormals kept).
//
// Thread safety: Run is called from one thread (the rank's); tasks must not call Run.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace treadle {

// How many CPUs this process may use; at least 1.
int UsableCpus();

class ThreadPool {
 public:
  // threads >= 1 (the caller counts). `pin`: worker i to the i-th CPU this process may use, and the
  // first thread that calls Run to the 0th.
  explicit ThreadPool(int threads, bool pin = false);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls body(worker) on every thread, worker in [0, size()); returns when all are done.
  template <typename Body>
  void Run(Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    RunTask([](void* context, int worker) { (*static_cast<Plain*>(context))(worker); }, &body);
  }

  // Splits [0, count) into size() contiguous parts whose ends are multiples of `grain`, and calls
  // body(begin, end) for the non-empty ones. How it is split never changes a result.
  template <typename Body>
  void ParallelFor(int64_t count, int64_t grain, Body&& body) {
    const int64_t pieces = (count + grain - 1) / grain;
    if (size_ == 1 || pieces <= 1) {
      if (count > 0) body(int64_t{0}, count);
      return;
    }
    Run([&](int worker) {
      const int64_t begin = pieces * worker / size_ * grain;
      const int64_t end = pieces * (worker + 1) / size_ * grain;
      if (begin < count && begin < end) body(begin, end < count ? end : count);
    });
  }

  // Inside a task: waits until all threads of the pool have come here.
  void Barrier();

 private:
  using Task = void (*)(void* context, int worker);
  void RunTask(Task task, void* context);

  struct State;
  const int size_;
  std::unique_ptr<State> state_;
};

}  // namespace treadle
