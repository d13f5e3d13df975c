// The baseline that iteration-level scheduling is measured against (ORCA section 6.2): a batch is
// admitted as a whole, only when nothing runs, and its answers are delivered when all of it has
// ended. No padding; finished rows leave the computation. It remembers nothing.
#pragma once

#include <algorithm>

#include "scheduler/policy.h"

namespace treadle {

class RequestLevel final : public Policy {
 public:
  std::string_view name() const override { return "request-level"; }
  Delivery delivery() const override { return Delivery::kWhenIdle; }
  std::vector<Request*> Order(const PolicyView& view) const override { return LiveRequests(view); }
  Selection Select(const PolicyView& view) override {
    const bool running = std::ranges::any_of(
        view.pool, [](const auto& request) { return request->state == RequestState::kRunning; });
    Selection selection;
    if (!running) {
      selection = NextBatch(view);
    } else {
      for (const auto& request : view.pool) {
        if (IsReady(*request, view.limits)) selection.push_back({request.get(), 0});
      }
    }
    AssignTokens(view, selection);
    return selection;
  }

 private:
  // The requests that form the next batch: in arrival order, up to the cap and the free pages.
  static Selection NextBatch(const PolicyView& view) {
    Selection selection;
    int64_t sequences = 0;
    KvCapacity left = view.kv;
    for (const auto& request : view.pool) {
      if (request->state != RequestState::kWaiting) continue;
      sequences += BatchSequences(*request);
      if (sequences > view.limits.max_batch_size || !Admits(view, left, *request)) break;
      selection.push_back({request.get(), 0});
    }
    return selection;
  }
};

}  // namespace treadle
