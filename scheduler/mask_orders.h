// The masks of plans in flight, for the serving loop: orders them from the mask thread once their
// sequences have all tokens before them, and excuses those that are late.
//
// No iteration waits for a mask for longer than others can bear. A sequence whose mask is late sits
// out (Sequence::sits_out) until the mask has arrived; where that takes too long its request is to
// end.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <chrono>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "scheduler/mask_thread.h"
#include "scheduler/planner.h"
#include "scheduler/request/request.h"

namespace treadle {

class RequestPool;

class MaskOrders {
 public:
  // An iteration waits for a mask so many times as long as iterations take, within bounds.
  static constexpr int kPatience = 2;
  static constexpr std::chrono::milliseconds kMinPatience{10}, kMaxPatience{500};
  // A sequence whose mask is later than that ends its request.
  static constexpr std::chrono::seconds kMaxSittingOut{5};

  // Both outlive this. `wake` is MaskThread's.
  MaskOrders(Engine& engine, RequestPool& pool, std::function<void()> wake)
      : pool_(pool), thread_(engine, std::move(wake)) {}

  // A plan that is about to be submitted, and what the loop remembers of it.
  void NotePlan(const IterationPlan& plan, const PlanInFlight& note, Clock::time_point now);
  // The sequence has another token.
  void NoteToken(Request& request, Sequence& sequence, Clock::time_point now);
  // Nobody looks any more at what the sequence's steps sample.
  void Forget(Sequence& sequence);
  // Tells the mask thread what was noted.
  void Give();
  void NoteIteration(double seconds);  // how long one took
  // The engine was restarted: no plan is in flight.
  void Clear();

  // Excuses what is late. Gives the requests that are to end, and why.
  std::vector<std::pair<Request*, absl::Status>> Excuse(Clock::time_point now);
  // The first time at which a mask is late; Clock::time_point::max(): none is awaited.
  Clock::time_point next_due() const;

 private:
  // A masked step that was ordered, until its mask is there or it is excused; then a sequence that
  // sits out, until it is ready again.
  struct Awaited {
    RequestId request = 0;
    uint32_t candidate = 0;
    MaskThread::Step step;
    Clock::time_point due;
    Clock::time_point ordered;
  };
  // The sequence's earliest step without an order, without its tokens.
  static MaskThread::Step TakeUnordered(Sequence& sequence);
  // Null: it, or its request, has ended.
  Sequence* SequenceOf(const Awaited& mask, Request*& request) const;

  RequestPool& pool_;
  std::vector<MaskThread::Step> orders_;    // noted, not yet given to the mask thread
  std::vector<MaskThread::Step> unwanted_;  // likewise: nobody looks at what is sampled
  std::vector<Awaited> awaited_, sitting_out_;
  Clock::duration iteration_time_{};  // of late
  MaskThread thread_;
};

}  // namespace treadle
