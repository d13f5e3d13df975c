// Works out what masked steps may sample, beside the serving loop and while the iteration runs, and
// hands it to the engine (Engine::SetMasks).
//
// min_new_tokens: as long as fewer tokens were produced, end tokens are masked too, unless nothing
// else is left: then the constraint ends the answer. A candidate of which nothing more is wanted,
// or whose constraint allows no token or takes too long, is told everything is allowed; Stuck says
// so of the latter.
//
// Thread safety: Order from one thread, the serving loop's. The queue holds a step for each that is
// in flight. The thread starts with the first order (where none is to be had, Order does its
// work); the destructor drops what waits.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "engine/engine.h"
#include "scheduler/token_constraint.h"

namespace treadle {

struct RequestSpec;

// One candidate under its request's constraint.
class MaskedCandidate {
 public:
  // `produced`: the tokens that it has, of which the last is given with its first order.
  MaskedCandidate(const RequestSpec& spec, std::span<const int32_t> produced);

  // What a candidate may take of the mask thread, for others wait meanwhile: of its processor time,
  // at first and with each token.
  static constexpr std::chrono::milliseconds kFirstTime{250}, kTimePerToken{20};

  // Why the constraint allows nothing as token number `produced` (from 0) of the candidate; ok: it
  // does. Once a result has that token.
  absl::Status Stuck(int32_t produced) const;

 private:
  friend class MaskThread;

  // Takes `token` (-1: none yet) and works out the next one's mask.
  void Advance(int32_t token, std::vector<uint32_t>& allowed);
  void KeepGoing(std::vector<uint32_t>& allowed) const;

  const std::shared_ptr<const ConstraintGrammar> grammar_;
  const std::vector<int32_t> end_tokens_;
  const int32_t min_new_tokens_;
  const std::vector<int32_t> earlier_;  // all that it has but the last

  // Confined to the mask thread.
  std::unique_ptr<TokenConstraint> state_;
  int32_t accepted_ = 0;
  std::chrono::nanoseconds spent_{0};

  std::atomic<int32_t> stuck_at_{-1};
  absl::Status why_;  // written before stuck_at_
};

class MaskThread {
 public:
  // A masked step whose sequence has all tokens before it.
  struct Step {
    uint64_t epoch = 0;
    uint64_t iteration = 0;
    int32_t step = 0;  // in its plan
    std::shared_ptr<MaskedCandidate> candidate;
    int32_t token = -1;  // that the candidate got since its last order; -1: none
    bool wanted = true;  // false: nobody will look at what is sampled
  };

  explicit MaskThread(Engine& engine) : engine_(engine) {}
  ~MaskThread();

  void Order(std::vector<Step> steps) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void WorkOut(const std::vector<Step>& steps);

  Engine& engine_;

  Mutex mutex_;
  CondVar ordered_;
  std::vector<Step> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread thread_;  // confined to the loop's thread
};

}  // namespace treadle
