// From an engine to something that serves: K/V accounting, request pool, policy, ledger and the
// serving loop, composed once for `serve`, in-process `generate`, the benchmarks and the tests.
//
// Thread safety: Create, Start and Stop from the owner's thread; the parts say for themselves.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/kv/kv_events.h"
#include "engine/kv/kv_slot_manager.h"
#include "engine/kv/page_files.h"
#include "engine/plan/defaults.h"
#include "scheduler/batch_sizes.h"
#include "scheduler/ledger.h"
#include "scheduler/policy.h"
#include "scheduler/request/request_pool.h"
#include "scheduler/serving_loop.h"
#include "scheduler/speculation/draft_model.h"
#include "server/session/served_model.h"

namespace treadle {

struct SchedulingOptions {
  int64_t max_batch_size = kDefaultBatchSize;      // sequences in one iteration
  int64_t max_batch_tokens = kDefaultBatchTokens;  // tokens in one iteration; > max_batch_size
  int64_t max_queue = 1024;                        // waiting requests
  std::string policy = "fcfs";
  int64_t microbatch_size = 0;   // as BatchLimits
  bool compute_padding = false;  // as ServingLoop::Options
  double prefix_cache = 1;       // the part of the K/V pages that may hold what no request uses
  std::shared_ptr<PageFiles> page_files;  // the prefix cache's second tier; null: none
  bool kv_events = false;                 // who asks is told what the prefix cache holds
  Clock::duration max_ttft{0};
  // Iterations are measured before the first request, and what `batch` says is chosen by that.
  bool measure = false;
  AutoBatch batch = {};
  double position_share = 0;   // as IterationCost
  int64_t max_candidates = 0;  // of a request; 0: max_batch_size, whatever is chosen
  // As ServingLoop::Options.
  bool recover = true;
  std::function<void(const absl::Status&)> give_up = {};
};

class ServingStack {
 public:
  // `model` says how many pages of which size the engine has. `draft`: not started; may be null.
  static absl::StatusOr<std::unique_ptr<ServingStack>> Create(
      ServedModel model, std::unique_ptr<Engine> engine, const SchedulingOptions& options,
      std::unique_ptr<DraftModel> draft = nullptr);
  ~ServingStack();  // stops

  // Afterwards options() has the limits that were chosen, and chosen() says why.
  absl::Status Start();
  const std::string& chosen() const { return chosen_; }  // empty: nothing was
  // Refuses new requests and waits until all accepted ones ended; false if `deadline` came first.
  bool Drain(Clock::time_point deadline);
  // Ends what is left with `status`, requests that wait for adapters too. Idempotent.
  void Stop(absl::Status status);

  // The serving loop's state; callable from any thread.
  uint64_t turns() const { return loop_->turns(); }
  bool engine_stands() const { return loop_->engine_stands(); }
  // K/V pages of the scarcest kind (kv_paging.h) as of the last iteration: the pages themselves
  // belong to the loop.
  struct Pages {
    int64_t free = 0;
    int64_t total = 0;
  };
  Pages pages() const;

  const ServedModel& model() const { return model_; }
  const SchedulingOptions& options() const { return options_; }
  RequestPool& pool() { return pool_; }
  Ledger& ledger() { return ledger_; }
  KvEventLog* kv_events() { return kv_events_.get(); }  // null: nobody is told

 private:
  ServingStack(ServedModel model, std::unique_ptr<Engine> engine, std::unique_ptr<Policy> policy,
               const SchedulingOptions& options, std::unique_ptr<DraftModel> draft);

  const ServedModel model_;
  SchedulingOptions options_;  // constant after Start
  std::string chosen_;
  const std::unique_ptr<Engine> engine_;
  const std::unique_ptr<DraftModel> draft_;
  const std::unique_ptr<Policy> policy_;
  const std::unique_ptr<KvEventLog> kv_events_;
  KvSlotManager kv_;  // the loop's
  RequestPool pool_;
  Ledger ledger_;
  std::unique_ptr<ServingLoop> loop_;  // last: it uses all others
};

}  // namespace treadle
