// Prometheus metrics under vLLM's names with our prefix, served at /metrics.
//
// Fed by the ledger's follower, off the loop; gauges of the queue are read from the pool at each
// scrape. Thread safety: Record from one thread (the follower's); scrapes from the exposer's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/ledger.h"
#include "scheduler/request_pool.h"

namespace treadle {

class Metrics {
 public:
  // `pool` must outlive the metrics.
  Metrics(const std::string& model_name, const RequestPool& pool);
  ~Metrics();

  void Record(const LedgerRecord& record);

  // Serves http://`address`/metrics from now on; port 0 takes any free one. Returns the port.
  absl::StatusOr<int> Listen(const std::string& address);

 private:
  struct Instruments;
  struct Server;
  std::shared_ptr<Instruments> instruments_;
  std::unique_ptr<Server> server_;  // after what it scrapes
};

}  // namespace treadle
