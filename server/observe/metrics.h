// Prometheus metrics under vLLM's names with our prefix, served at /metrics.
//
// Fed by the ledger's follower, off the loop; gauges of the queue are read from the pool at each
// scrape. Requests that are marked internal (the warm-up) are left out. Thread safety: Record from
// one thread (the follower's); scrapes from the HTTP server's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/ledger.h"
#include "scheduler/request_pool.h"
#include "server/access/api_keys.h"
#include "server/http/http_server.h"
#include "server/observe/log.h"

namespace treadle {

class Metrics {
 public:
  // `pool` and `log` must outlive the metrics; without a log there is no counter of its lost lines.
  Metrics(const std::string& model_name, const RequestPool& pool, const Log* log = nullptr);
  ~Metrics();

  void Record(const LedgerRecord& record);

  // What /metrics serves; from any thread.
  std::string Scrape() const;

  // Serves http://`address`/metrics from now on, or https:// with `tls`; port 0 takes any
  // free one. Returns the port. `keys` and `tls`, if given, must outlive the metrics: a scrape
  // needs a valid key as its bearer token.
  absl::StatusOr<int> Listen(const std::string& address, const ApiKeys* keys = nullptr,
                             const SocketTls* tls = nullptr);

 private:
  struct Instruments;
  std::unique_ptr<Instruments> instruments_;
  std::unique_ptr<HttpServer> server_;  // after what it scrapes
};

}  // namespace treadle
