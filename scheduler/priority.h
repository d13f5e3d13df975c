// Classes by RequestSpec::priority, smaller ones first; within a class, first come, first served.
//
// A waiting request of an earlier class is admitted before all others that wait, and its prompt is
// computed before theirs, those of running requests included. Whoever runs keeps its place and its
// pages: it is never preempted, and its next token comes with every iteration as under Fcfs. Later
// classes may wait as long as earlier ones have work (FairShare starves nobody). It remembers
// nothing.
#pragma once

#include <algorithm>
#include <utility>

#include "scheduler/policy.h"

namespace treadle {

class Priority final : public Policy {
 public:
  std::string_view name() const override { return "priority"; }
  Delivery delivery() const override { return Delivery::kAsGenerated; }
  std::vector<Request*> Order(const PolicyView& view) const override {
    std::vector<Request*> order = LiveRequests(view);
    std::ranges::stable_sort(order, {}, [](const Request* request) {
      return std::pair(request->state == RequestState::kWaiting, request->spec.priority);
    });
    return order;
  }
  Selection Select(const PolicyView& view) override {
    Selection selection = TakeMembers(view, Order(view));
    std::ranges::stable_sort(selection, {},
                             [](const Selected& member) { return member.request->spec.priority; });
    AssignTokens(view, selection);
    return selection;
  }
};

}  // namespace treadle
