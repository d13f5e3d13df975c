// Weighted fair shares by API key's owner: start-time fair queueing (Goyal, Vin and Cheng 1996)
// over admissions, with tokens as the cost, as in VTC (Sheng et al. 2024, "Fairness in Serving
// Large Language Models").
//
// An owner has a virtual time, which an admitted request advances by its cost / its owner's weight:
// its prompt and all tokens that it may produce. At its end, what was cached or not produced is
// given back. The next request is that of the owner whose virtual time is least; of one owner, the
// first that came. An owner with nothing that waits does not save up: its virtual time is at least
// that at which the last request was admitted. Whoever runs is never preempted, and the first
// request that does not fit stops admission, as under Fcfs.
//
// Bounds, where nothing is given back; L is the largest cost, w are weights: 1. While two owners
// have requests that wait, the costs admitted of each, divided by its weight, differ by at most
// L / w1 + L / w2. 2. No starvation: while an owner's first request waits, another owner's admitted
// requests cost at most L * w2 / w1 + L together. What is given back only moves its owner forward,
// by no more than was charged before.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/policy.h"

namespace treadle {

class FairShare final : public Policy {
 public:
  std::string_view name() const override { return "fair-share"; }
  Delivery delivery() const override { return Delivery::kAsGenerated; }

  void OnArrival(const Request& request) override {
    Owner& owner = owners_[request.spec.owner];
    if (owner.waiting++ == 0) owner.time = std::max(owner.time, time_);
    owner.weight = request.spec.weight;
  }

  void OnEnd(const Request& request, Clock::time_point) override {
    const auto found = owners_.find(request.spec.owner);
    Owner& owner = found->second;
    if (const auto charge = charges_.find(request.id); charge != charges_.end()) {
      owner.time -= std::max(0.0, charge->second.cost - Used(request)) / charge->second.weight;
      charges_.erase(charge);
      --owner.running;
    } else {
      --owner.waiting;
    }
    // Owners without requests, whose past makes no difference any more, are forgotten.
    std::erase_if(owners_, [this](const auto& each) {
      const Owner& one = each.second;
      return one.waiting + one.running == 0 && one.time <= time_;
    });
  }

  std::vector<Request*> Order(const PolicyView& view) const override {
    std::vector<Request*> order = LiveRequests(view);
    const auto waiting = std::stable_partition(
        order.begin(), order.end(),
        [](const Request* request) { return request->state != RequestState::kWaiting; });
    std::map<std::string_view, double> next;  // virtual times, if all before were admitted
    std::map<RequestId, double> starts;
    for (auto it = waiting; it != order.end(); ++it) {
      const Request& request = **it;
      const Owner& owner = owners_.at(request.spec.owner);
      double& time = next.try_emplace(request.spec.owner, owner.time).first->second;
      starts[request.id] = time;
      time += Cost(request) / owner.weight;
    }
    std::ranges::stable_sort(waiting, order.end(), {},
                             [&](const Request* request) { return starts.at(request->id); });
    return order;
  }

  Selection Select(const PolicyView& view) override {
    Selection selection = TakeMembers(view, Order(view));
    AssignTokens(view, selection);
    for (const Selected& member : selection) {
      const Request& request = *member.request;
      if (request.state != RequestState::kWaiting) continue;
      Owner& owner = owners_.at(request.spec.owner);
      time_ = std::max(time_, owner.time);
      owner.time += Cost(request) / owner.weight;
      --owner.waiting;
      ++owner.running;
      charges_[request.id] = {Cost(request), owner.weight};
    }
    return selection;
  }

  size_t owners() const { return owners_.size(); }

 private:
  struct Owner {
    double time = 0;  // virtual, tokens / weight
    double weight = 1;
    int64_t waiting = 0;
    int64_t running = 0;  // admitted, and not ended
  };
  struct Charge {
    double cost = 0;  // tokens
    double weight = 1;
  };

  static double Cost(const Request& request) {
    return request.prompt_length() +
           static_cast<double>(request.spec.candidates) * request.spec.max_new_tokens;
  }
  static double Used(const Request& request) {
    double used = request.prompt_length() - request.cached_tokens.value_or(0);
    for (const Sequence& sequence : request.sequences) used += sequence.produced;
    return used;
  }

  std::map<std::string, Owner, std::less<>> owners_;
  std::map<RequestId, Charge> charges_;  // of admitted requests
  double time_ = 0;                      // virtual, at which the last request was admitted
};

}  // namespace treadle
