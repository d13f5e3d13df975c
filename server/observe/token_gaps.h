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
  void BeginRecord();

  // The request was in the record of `time` seconds: how long after the one before, unless it
  // is the first or computed prompt tokens.
  std::optional<double> Observe(const LedgerMember& member, double time);

  void End(RequestId request) { seen_.erase(request); }

  size_t requests() const { return seen_.size(); }

 private:
  struct Seen {
    double time = 0;
    uint64_t record = 0;
  };
  std::unordered_map<RequestId, Seen> seen_;
  uint64_t record_ = 0;
};

}  // namespace treadle
