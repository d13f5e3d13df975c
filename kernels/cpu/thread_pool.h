// The threads of one rank: the caller and size() - 1 pinned workers that run one task together.
//
// A task is cut into pieces, one per thread as a rule, and whoever is free takes the next one. So a
// thread whose core was taken away holds up at most the piece that it had begun: a worker that
// comes late finds its work done, and nobody waits for it. (With one fixed share per thread, every
// op of every layer would wait until the machine's scheduler had run all of them.)
//
// Between tasks workers spin for a bounded time, then sleep on a futex, so an idle server costs no
// CPU. All threads use the same rounding and denormal mode (round to nearest, denormals kept).
//
// Thread safety: ParallelFor is called from one thread (the rank's); bodies must not call it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace treadle {

// How many CPUs this process may use; at least 1.
int UsableCpus();

class ThreadPool {
 public:
  // threads >= 1 (the caller counts). `pin`: worker i to CPU number first_cpu + i of those that
  // this process may use (beyond the last: from the first again); the caller's own place is
  // first_cpu (PinCaller).
  explicit ThreadPool(int threads, bool pin = false, int first_cpu = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Binds the calling thread, for good, to its CPU, if the pool pins. For the thread that will call
  // ParallelFor all its life: what it starts later would be bound too.
  void PinCaller();

  // Cuts [0, count) into min(size(), count / grain) contiguous ranges whose begins are multiples of
  // `grain`, and calls body(begin, end), or body(worker, begin, end) with the calling
  // thread's number in [0, size()), for each of them once; returns when all are done. How it is
  // cut, and who runs what, never changes a result.
  template <typename Body>
  void ParallelFor(int64_t count, int64_t grain, Body&& body) {
    const int64_t units = (count + grain - 1) / grain;
    Run(count, grain, std::min<int64_t>(units, size_), body);
  }
  // As ParallelFor with a grain of 1, where every index is a piece: for work that is uneven.
  template <typename Body>
  void ParallelForEach(int64_t count, Body&& body) {
    Run(count, 1, count, body);
  }
  // The same for two bodies, as one task: `second`, of which no index begins before `first` is done
  // with all of its own.
  template <typename First, typename Second>
  void ParallelForEach(int64_t firsts, First&& first, int64_t seconds, Second&& second) {
    std::atomic<uint32_t> left = static_cast<uint32_t>(firsts);
    // Pieces are taken in order, so whoever waits waits for one that runs.
    ParallelForEach(firsts + seconds, [&](int worker, int64_t begin, int64_t) {
      if (begin < firsts) {
        first(worker, begin);
        if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) left.notify_all();
      } else {
        AwaitZero(left);
        second(worker, begin - firsts);
      }
    });
  }

 private:
  // Runs piece number `piece`, which is below the number of pieces.
  using Task = void (*)(const void* context, int worker, int64_t piece);
  template <typename Body>
  void Run(int64_t count, int64_t grain, int64_t pieces, Body& body) {
    if (count <= 0) return;
    const auto run = [&](int worker, int64_t piece) {
      const int64_t units = (count + grain - 1) / grain;
      const int64_t begin = units * piece / pieces * grain;
      const int64_t end = std::min(count, units * (piece + 1) / pieces * grain);
      if constexpr (std::is_invocable_v<Body&, int, int64_t, int64_t>) {
        body(worker, begin, end);
      } else {
        body(begin, end);
      }
    };
    RunTask([](const void* context, int worker,
               int64_t piece) { (*static_cast<decltype(&run)>(context))(worker, piece); },
            &run, pieces);
  }
  void RunTask(Task task, const void* context, int64_t pieces);
  void AwaitZero(const std::atomic<uint32_t>& value) const;

  struct State;
  const int size_;
  std::unique_ptr<State> state_;
};

}  // namespace treadle
