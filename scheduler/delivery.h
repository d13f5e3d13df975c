// Brings absorbed tokens and the ends of requests to their streams, when the policy says: as they
// are generated, or once nothing runs. A request that ends early (cancelled, past its deadline,
// failed) is delivered at once under both, with what it had.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <vector>

#include "scheduler/ledger.h"
#include "scheduler/policy.h"

namespace treadle {

class Delivery {
 public:
  explicit Delivery(Policy::Delivery when) : when_(when) {}

  void Token(Request& request, StreamToken token);
  void Prompt(Request& request, std::vector<TokenDetail> details);
  // Times are those of the delivery: what a client waited.
  void End(Request& request, const absl::Status& status, Clock::time_point now);
  // Nothing runs: delivers what was held.
  void Flush(Clock::time_point now);

  // Requests delivered to their end since the last call.
  std::vector<LedgerEnd> TakeEnds();

 private:
  // A request that ended well while others still ran; the pool may have dropped it.
  struct Held {
    std::shared_ptr<TokenStream> stream;
    std::vector<StreamToken> tokens;
    std::vector<TokenDetail> prompt;
    Clock::time_point arrival;
    LedgerEnd end;
  };

  const Policy::Delivery when_;
  std::vector<Held> held_;  // in the order in which they ended
  std::vector<LedgerEnd> ends_;
};

}  // namespace treadle
