// Scheduling policies: from what is there, and what a policy remembers, to what runs next.
//
// No thread, clock, tensor, I/O or page id. A policy may keep a history; what it is told (arrivals,
// ends, what is there and when) decides all that it does, so that equal histories give equal
// selections. A new policy is one file and one line in policy.cc's table.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/defaults.h"
#include "engine/kv_slot_manager.h"
#include "scheduler/request.h"

namespace treadle {

struct BatchLimits {
  int64_t max_batch_size = kDefaultBatchSize;      // sequences in one plan
  int64_t max_batch_tokens = kDefaultBatchTokens;  // tokens in one plan; > max_batch_size
  int stages = 1;
  int depth = 1;
};

// What a policy chooses from.
struct PolicyView {
  std::span<const std::unique_ptr<Request>> pool;  // live requests in arrival order
  KvCapacity kv;
  BatchLimits limits;
  Clock::time_point now = {};
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

  // Does not change the requests. What it selects is submitted.
  virtual Selection Select(const PolicyView& view) = 0;

  // "fcfs", "request-level"; InvalidArgument lists the names otherwise.
  static absl::StatusOr<std::unique_ptr<Policy>> Create(std::string_view name);
  static std::vector<std::string_view> Names();
};

// Shared by policies and the planner.
// Pages that the request reserves on admission.
PageCounts PagesNeeded(const RequestSpec& request, const KvPaging& paging);
// Takes them from those that are left; false if there are not as many: nobody else is admitted
// then.
bool Admits(KvCapacity& left, const Request& request);
// kRunning, fewer plans in flight than allowed, and some sequence still has a token to produce.
bool IsReady(const Request& request, const BatchLimits& limits);
// Inputs that one plan may run and that are in none yet: the rest of the prompt, or, of what an
// engine that was restarted has to run again, first the prompt's part of it, then, of all sequences
// together, what they had produced.
int32_t InputsLeft(const Request& request);
inline bool InInitiation(const Request& request) { return InputsLeft(request) > 0; }
// Some of them were known.
inline bool IsCatchingUp(const Request& request) {
  const Sequence& first = request.sequences[0];
  if (first.next_position < request.prompt_length()) return first.next_position < first.known;
  return InInitiation(request);
}
// A sequence that has a token to produce beyond those produced or in flight.
bool HasTokenLeft(const Request& request, const Sequence& sequence);
// What the request counts for in max_batch_size: its sequences that have not ended, in both phases.
int64_t BatchSequences(const Request& request);
// That have to run its next inputs.
inline StageRange StagesOf(const Request& request) {
  return IsCatchingUp(request) ? request.missing : StageRange();
}
// Fills num_tokens: members in the increment phase get one token per sequence with a token left;
// the rest of max_batch_tokens goes to members in the initiation phase, in order. A plan is for
// some stages: if those of a member are not all, only members with the same ones stay.
void AssignTokens(Selection& selection, const BatchLimits& limits);

}  // namespace treadle
