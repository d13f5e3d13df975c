// The records of one client that watches the ledger, as messages.
//
// Not thread-safe.
#pragma once

#include <cstdint>
#include <map>

#include "scheduler/ledger.h"
#include "server/access/api_keys.h"

namespace treadle::v1 {
class LedgerRecord;
}  // namespace treadle::v1

namespace treadle {

class LedgerReader {
 public:
  // `from_start`: with what is still in the ring when Next is called first. Otherwise the first
  // message names, as arrivals, the requests that are there then. `reader`: as FillLedgerRecord's.
  LedgerReader(const Ledger& ledger, bool from_start, ApiKey::Terms reader);

  // The next record; false if there is none yet.
  bool Next(v1::LedgerRecord& message);

 private:
  void Skip();

  const Ledger& ledger_;
  const bool from_start_;
  const ApiKey::Terms reader_;
  bool began_ = false;
  uint64_t next_ = 0;
  std::map<RequestId, LedgerArrival> present_;  // passed over, and not ended
};

}  // namespace treadle
