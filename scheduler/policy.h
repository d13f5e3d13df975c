// Scheduling policies: from what is there, and what a policy remembers, to what runs next.
//
// No thread, clock, tensor, I/O or page id. A policy may keep a history; what it is told (arrivals,
// ends, what is there and when) decides all that it does, so that equal histories give equal
// selections. A new policy is one file and one line in policy.cc's table.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/kv/kv_slot_manager.h"
#include "engine/plan/defaults.h"
#include "scheduler/request/progress.h"
#include "scheduler/request/request.h"

namespace treadle {

struct BatchLimits {
  int64_t max_batch_size = kDefaultBatchSize;      // sequences in one plan
  int64_t max_batch_tokens = kDefaultBatchTokens;  // tokens in one plan; > max_batch_size
  int stages = 1;
  int depth = 1;
  int64_t max_context = 0;      // tokens of a request; 0: not known
  int64_t microbatch_size = 0;  // sequences, of faster-transformer; 0: max_batch_size
};

// The most rows of padding in a plan, which are one sequence's.
inline int64_t PaddingRows(const BatchLimits& limits) {
  const int64_t rows = limits.max_batch_tokens - 1;
  return limits.max_context > 0 ? std::min(rows, limits.max_context) : rows;
}

// The view that a policy chooses from.
struct PolicyView {
  std::span<const std::unique_ptr<Request>> pool;  // live requests in arrival order
  KvCapacity kv;
  BatchLimits limits;
  Clock::time_point now = {};
  // The prefix cache's part of a request that is to begin (progress.h); unset: nothing.
  std::function<KvSlotManager::Found(const Request&)> cached = {};
};

// One member of the next iteration.
struct Selected {
  Request* request = nullptr;
  // Inputs of the initiation phase to run (>= 1), or, in the increment phase, 1 per live sequence.
  // 0: only reserve (the budget is spent, but the pages are the request's from now on).
  int32_t num_tokens = 0;
};
using Selection = std::vector<Selected>;

class Policy {
 public:
  enum class Delivery : uint8_t { kAsGenerated, kWhenIdle };

  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  virtual Delivery delivery() const = 0;

  // For policies with a history; others leave them as they are. A request is told of once when it
  // comes, before it can be selected, and once when it has ended, however it did; times are those
  // of the same clock as PolicyView::now.
  virtual void OnArrival(const Request&) {}
  virtual void OnEnd(const Request&, Clock::time_point) {}

  // All live requests: those that run before those that wait, and these in the order in which they
  // are admitted if no others come.
  virtual std::vector<Request*> Order(const PolicyView& view) const = 0;
  // Does not change the requests. Its selection is submitted.
  virtual Selection Select(const PolicyView& view) = 0;
  // Rows beside those of the last selection that its system would compute for nobody. They are
  // counted, and run only where that is asked for (LoopCore::Options).
  virtual int64_t padding() const { return 0; }

  // "fcfs", "priority" ...; InvalidArgument lists the names otherwise.
  static absl::StatusOr<std::unique_ptr<Policy>> Create(std::string_view name);
  static std::vector<std::string_view> Names();
};

// Below: shared by policies and the planner.

// The pages that the request reserves on admission.
PageCounts PagesNeeded(const RequestSpec& request, const KvPaging& paging);
// Takes a request's pages from `left`, but for those that it can share with requests that run;
// false if there are not enough, or pages of its prompt are being read, and then nobody else is
// admitted.
bool Admits(const PolicyView& view, KvCapacity& left, const Request& request);
// Requests that have not ended, in arrival order.
std::vector<Request*> LiveRequests(const PolicyView& view);
// Sequences that a plan may have: min(max_batch_size, ceil((running + waiting that fit) / stages)).
// A literal Algorithm 1 would fill the first plan and leave the other stages idle. `order`: all
// live requests, those that run before those that wait.
int64_t BatchCap(const PolicyView& view, std::span<Request* const> order);
// The members of a plan without their tokens: those of `order`, as above, that are ready or wait,
// up to the cap; the first that does not fit stops it, so nobody is overtaken. The first member is
// taken even if it alone exceeds its plan's share (a request of n candidates is never split).
Selection TakeMembers(const PolicyView& view, std::span<Request* const> order);
// kRunning, fewer plans in flight than allowed, and some sequence still has a token to produce.
bool IsReady(const Request& request, const BatchLimits& limits);
// Fills num_tokens: members in the increment phase get one token per sequence with a token left;
// the rest of max_batch_tokens goes to members in the initiation phase, in order, for what the
// cache does not have. All members of a plan run on the same stages: where a member needs some
// stages only, members that need others are dropped from the selection.
void AssignTokens(const PolicyView& view, Selection& selection);

}  // namespace treadle
