// The serving loop without its thread: Wait and Turn are the two halves of the loop of
// docs/design.md. Tests and benchmarks turn it by hand.
//
// An engine that fails is restarted, and requests stay. A running request goes on where it was once
// the engine has run its known inputs again (progress.h). It ends instead if the options say so, or
// after it has lost too many epochs without a new result (NoteLoss). All requests end if the engine
// has not come back within kRestartPatience.
//
// Invariants: 1. A request that is kRunning holds every page that it may ever need. 2. A page is
// freed only when its request has ended and no plan in flight names it. 3. Each request's stream is
// ended exactly once. Thread safety: confined to one thread, the loop's.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "engine/engine.h"
#include "engine/kv/kv_slot_manager.h"
#include "scheduler/batch_sizes.h"
#include "scheduler/cost/calibration.h"
#include "scheduler/delivery.h"
#include "scheduler/first_token.h"
#include "scheduler/ledger.h"
#include "scheduler/mask_orders.h"
#include "scheduler/planner.h"
#include "scheduler/policy.h"
#include "scheduler/request/page_fetches.h"
#include "scheduler/request/request_pool.h"
#include "scheduler/speculation.h"
#include "scheduler/speculation/ngram_drafter.h"

namespace treadle {

// Injectable time, so that tests decide what "now" is.
class TimeSource {
 public:
  virtual ~TimeSource() = default;
  virtual Clock::time_point Now() const = 0;
  static const TimeSource& Steady();
};

class LoopCore {
 public:
  struct Options {
    BatchLimits limits;         // stages and depth are taken from the engine
    double position_share = 0;  // as IterationCost
    // A plan without steps after so long without one; releases ride on it.
    std::chrono::milliseconds heartbeat{1000};
    MakeDrafter drafter = MakeNgramDrafter;  // of requests that speculate
    DraftModel* draft_model = nullptr;       // of those that want one; outlives the requests
    // Longer than that, or than its deadline, no request may wait for its first token: one that
    // would is refused when it comes (first_token.h). 0: nothing is foretold.
    Clock::duration max_ttft{0};
    bool recover = true;  // else requests that run end with an engine that fails
    // Policy::padding is run, too, as far as max_batch_tokens has room. The cache has pages for it
    // beside a request's.
    bool compute_padding = false;
    // Set: an engine that fails is not restarted. Every request ends, those that wait too, no more
    // are accepted, and this is called once with the reason, on the loop's thread; must not block.
    std::function<void(const absl::Status&)> give_up = {};
  };

  static constexpr std::chrono::seconds kRestartPatience{30};
  static constexpr double kMaxRetry = 60;  // seconds that a refusal by max_ttft asks for

  LoopCore(Engine& engine, KvSlotManager& kv, RequestPool& pool, Policy& policy, Ledger& ledger,
           const TimeSource& time, const Options& options);

  // Learns what iterations cost, and chooses limits by that; the engine has just been started. They
  // grow later if iterations turn out to cost less, looked at every kGrowAfter of them.
  // Where it fails, limits stay, and what must be done about the engine is done by Turn.
  absl::Status Calibrate(Calibration how, const AutoBatch& choice);
  static constexpr size_t kGrowAfter = 256;
  const BatchLimits& limits() const { return limits_; }
  const IterationCost& cost() const { return cost_; }

  // Blocks until there is news, the next deadline of a request, or the next heartbeat.
  void Wait();
  // One pass; the engine must have been started. True if something was submitted or absorbed.
  bool Turn();
  // The pool is draining, every accepted request has ended and was delivered, and the pages that
  // are to be stored were given.
  bool drained() const { return drained_; }
  // The engine takes plans: its epoch stands, and it was not given up.
  bool engine_stands() const {
    return !gave_up_ && engine_.status().ok() && (!in_flight_.empty() || engine_.HasRoom());
  }
  // Ends every request with `status`, those not yet taken from the pool too, without waiting for
  // plans in flight. Nothing may be called afterwards.
  void EndAll(const absl::Status& status);

 private:
  void GrowLimits();
  bool AbsorbResults();
  void Absorb(IterationResult& result);
  size_t AbsorbStep(const PlanInFlight::Target& target, StepResult& step);
  void AbsorbToken(Request& request, Sequence& sequence, RowResult& row);
  void Recover();
  void RecoverRequest(Request& request, const absl::Status& status, bool stood);
  void NoteStanding();
  void TakeInbox();
  void Foretell(Request& request);
  void Apply(RequestPool::Command& command);
  void FinishCandidate(Request& request, uint32_t candidate);
  void Expire();
  bool SubmitPlans();
  void Submit(const Selection& selection, Clock::time_point selecting_since);
  bool HeartbeatDue() const { return now_ >= last_submit_ + heartbeat_; }
  void Settle();

  void FinishSequence(Request& request, Sequence& sequence, FinishReason reason);
  void End(Request& request, const absl::Status& status);
  void Retire(Request& request);
  void AppendRecord(const IterationResult& result, PlanInFlight& note);

  // Constant.
  Engine& engine_;
  KvSlotManager& kv_;
  RequestPool& pool_;
  Policy& policy_;
  Ledger& ledger_;
  const TimeSource& time_;
  const std::chrono::milliseconds heartbeat_;
  const Clock::duration max_ttft_;
  const bool recover_, compute_padding_;
  const std::function<void(const absl::Status&)> give_up_;
  const Clock::time_point began_;

  // Confined to the loop's thread.
  BatchLimits limits_;
  AutoBatch auto_batch_;
  BatchLimits most_;  // that the engine takes; with auto_batch_ alone
  Planner planner_;
  const std::function<KvSlotManager::Found(const Request&)> cached_;  // of policies' views
  PageFetches fetches_;
  Clock::time_point fetches_due_ = Clock::time_point::max();
  Delivery delivery_;
  IterationCost cost_;
  FirstTokenForecast forecast_;
  Clock::time_point now_;          // of this turn
  Clock::time_point last_submit_;  // of a plan, heartbeats included
  Clock::time_point idle_since_;   // when the engine had no plan any more
  Clock::time_point next_deadline_ = Clock::time_point::max();  // no live request's is earlier
  uint64_t next_iteration_ = 0;
  std::deque<PlanInFlight> in_flight_;
  std::vector<LedgerArrival> arrivals_;  // since the last record
  std::vector<PlanInFlight> spare_;      // returned ones, for their memory
  int64_t waiting_ = 0;                  // for their first step
  int64_t reserved_ = 0;                 // of these: admitted
  int64_t running_ = 0;
  bool some_left_ = false;  // some live request can be dropped
  bool draining_ = false;
  bool drained_ = false;
  bool gave_up_ = false;
  bool stood_ = false;               // the engine's epoch had room at some time
  Clock::time_point failing_since_;  // of epochs in a row of which all but the first never stood

  Speculation speculation_;
  MaskOrders masks_;  // last: its threads use the engine
};

}  // namespace treadle
