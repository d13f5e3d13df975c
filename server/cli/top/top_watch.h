// A server watched over its own RPCs: GetModelInfo once per connection, WatchLedger all the time,
// GetLoad once per interval. Where it does not answer, that is a report, too, and it is tried again
// after a pause that doubles up to a bound.
//
// Thread safety: construction and destruction on the owner's thread; Take from one thread.
// Destruction cancels what is under way and does not wait for the server.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "server/cli/client_flags.h"
#include "server/cli/top/top_view.h"

namespace treadle {

class TopWatch final {
 public:
  struct Options {
    std::string target;
    ClientAccess access;
    std::chrono::milliseconds interval{1'000};
    std::chrono::milliseconds window{60'000};  // of percentiles
    // False: the first call that fails is the end.
    bool retry = true;
    std::chrono::milliseconds first_pause{500};
    std::chrono::milliseconds longest_pause{8'000};
    // For every call but the ledger's stream, which is opened again after an hour.
    std::chrono::milliseconds call_deadline{5'000};
  };

  explicit TopWatch(Options options);
  ~TopWatch();

  // Readable while Take has something.
  int news() const;
  // The next report; of a reader that falls far behind the oldest are dropped. After one with
  // trouble and no retry_in there is no other. The first report of a connection is of no interval:
  // its `numbers->seconds` is 0.
  std::optional<TopReport> Take();

 private:
  class State;
  const std::unique_ptr<State> state_;
};

}  // namespace treadle
