// Works out what masked steps may sample, beside the serving loop and while the iteration runs, and
// hands it to the engine (Engine::SetMasks).
//
// An iteration does not wait for a mask that is late: the loop excuses its step, for which
// everything is allowed then, drops what is sampled there, and runs the step again once the mask
// has arrived. A library that works out masks cannot be interrupted, so a thread that is at an
// excused step leaves the other steps to another thread, and goes on alone at a lower priority.
// While there is nothing to do it has constraints foresee tokens.
//
// Thread safety: Order, Excuse and Relieve from one thread, the serving loop's. The queue holds a
// step for each that is in flight. Threads start with orders (where none is to be had, Order does
// its work); the destructor drops what waits, and waits for masks that are being worked out.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "engine/engine.h"
#include "scheduler/request/masked_candidate.h"

namespace treadle {

class MaskThread {
 public:
  // A masked step whose sequence has all tokens before it.
  struct Step {
    uint64_t epoch = 0;
    uint64_t iteration = 0;
    int32_t step = 0;    // in its plan
    int32_t output = 0;  // in the step; the first of them
    std::shared_ptr<MaskedCandidate> candidate;
    std::vector<int32_t> tokens = {};  // that the candidate got since its last order
    std::vector<int32_t> draft = {};   // guesses that the step verifies: an output follows each
    // Whoever sets it gives the engine the step's masks.
    std::shared_ptr<std::atomic<bool>> given = std::make_shared<std::atomic<bool>>(false);
  };
  // Threads at once: one for the queue, the others at steps that were excused.
  static constexpr size_t kMaxThreads = 4;

  // `wake`: called on any thread when the mask of an excused step has arrived; must not block.
  MaskThread(Engine& engine, std::function<void()> wake)
      : engine_(engine), wake_(std::move(wake)) {}
  ~MaskThread();

  void Order(std::vector<Step> steps) ABSL_LOCKS_EXCLUDED(mutex_);
  // Tells the engine that everything is allowed at a step that nobody wants any more.
  void Allow(const Step& step);
  // For a step whose mask is late. False if it was given just now.
  bool Excuse(const Step& step);
  // After steps were excused: what is worked out already reaches the engine, and if the thread of
  // the queue is at such a step, another one takes the queue.
  void Relieve() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Worker {
    std::thread thread;
    pid_t id = 0;  // of the thread, for the system
    bool relieved = false;
    bool ended = false;
  };
  struct Done {
    uint64_t epoch, iteration;
    std::vector<OutputMask> masks;
  };

  bool StartWorker() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run(Worker& worker) ABSL_LOCKS_EXCLUDED(mutex_);
  // False if the worker is to end.
  bool Next(Worker& worker, Step& step) ABSL_LOCKS_EXCLUDED(mutex_);
  void WorkOut(const Step& step) ABSL_LOCKS_EXCLUDED(mutex_);
  void Give(std::vector<Done> done);

  Engine& engine_;
  const std::function<void()> wake_;

  Mutex mutex_;
  CondVar ordered_;
  std::deque<Step> queue_ ABSL_GUARDED_BY(mutex_);
  std::vector<Done> done_ ABSL_GUARDED_BY(mutex_);  // the engine hears of them together
  std::deque<std::shared_ptr<MaskedCandidate>> ahead_ ABSL_GUARDED_BY(mutex_);  // may foresee
  std::shared_ptr<std::atomic<bool>> at_ ABSL_GUARDED_BY(mutex_);  // the queue's worker's step
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Worker>> workers_ ABSL_GUARDED_BY(mutex_);  // last: the queue's
};

}  // namespace treadle
