// The time between a request's tokens, from iteration records.
//
// Thread safety: none; confined to the thread that records.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "scheduler/ledger.h"

namespace treadle {

class TokenGaps {
 public:
  // A record begins. With it go requests that no record has named for a while: one that ends while
  // a plan with it is under way is named once more afterwards, and never ends again.
  void BeginRecord() {
    if (++record_ % kForgottenAfter != 0) return;
    std::erase_if(seen_, [this](const auto& entry) {
      return entry.second.record + kForgottenAfter <= record_;
    });
  }

  // The request was in the record of `time` seconds: how long after the one before, unless it
  // is the first or computed prompt tokens.
  std::optional<double> Observe(const LedgerMember& member, double time) {
    const auto [seen, first] = seen_.try_emplace(member.request);
    std::optional<double> gap;
    if (!first && !member.initiation) gap = time - seen->second.time;
    seen->second = {time, record_};
    return gap;
  }

  void End(RequestId request) { seen_.erase(request); }

  size_t requests() const { return seen_.size(); }

 private:
  // A request that generates is in every plan, or every plan of its turn in the pipeline.
  static constexpr uint64_t kForgottenAfter = 1024;  // records

  struct Seen {
    double time = 0;
    uint64_t record = 0;
  };
  std::unordered_map<RequestId, Seen> seen_;
  uint64_t record_ = 0;
};

}  // namespace treadle
