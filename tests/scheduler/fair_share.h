// A policy with a history, for tests: keys share the engine by how many tokens each got lately. It
// stands for all that a policy may go by: who asks, when, and what was before.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/fcfs.h"
#include "scheduler/policy.h"

namespace treadle {

class FairShare final : public Policy {
 public:
  static constexpr std::string_view kName = "fair-share";
  static constexpr std::chrono::seconds kHalfLife{1};

  std::string_view name() const override { return kName; }
  Delivery delivery() const override { return Delivery::kAsGenerated; }

  void OnArrival(const Request& request) override { ++keys_[request.spec.owner].live; }
  // A key that is of no consequence any more is forgotten.
  void OnEnd(const Request& request, Clock::time_point now) override {
    const auto key = keys_.find(request.spec.owner);
    if (--key->second.live == 0 && Lately(key->second, now) < 1) keys_.erase(key);
  }

  // As Fcfs, but whoever runs goes first, and then the key that got least.
  Selection Select(const PolicyView& view) override {
    std::vector<Request*> order;
    for (const auto& request : view.pool) {
      if (request->state == RequestState::kWaiting || IsReady(*request, view.limits)) {
        order.push_back(request.get());
      }
    }
    std::ranges::stable_sort(order, {}, [&](const Request* request) {
      return std::pair(request->state == RequestState::kWaiting,
                       Lately(keys_.at(request->spec.owner), view.now));
    });
    const int64_t cap = Fcfs::BatchCap(view);
    Selection selection;
    int64_t sequences = 0;
    KvCapacity left = view.kv;
    for (Request* const request : order) {
      sequences += BatchSequences(*request);
      if (!selection.empty() && sequences > cap) break;
      if (request->state == RequestState::kWaiting && !Admits(view, left, *request)) break;
      selection.push_back({request, 0});
    }
    AssignTokens(view, selection);
    for (const Selected& member : selection) {
      Key& key = keys_.at(member.request->spec.owner);
      key.tokens = Lately(key, view.now) + member.num_tokens;
      key.when = view.now;
    }
    return selection;
  }

  size_t keys() const { return keys_.size(); }

 private:
  struct Key {
    int64_t live = 0;   // requests
    double tokens = 0;  // that it got, as of `when`, fading
    Clock::time_point when;
  };

  static double Lately(const Key& key, Clock::time_point now) {
    return key.tokens * std::exp2(-std::chrono::duration<double>(now - key.when) / kHalfLife);
  }

  std::map<std::string, Key> keys_;
};

}  // namespace treadle
