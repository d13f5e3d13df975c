// Prometheus metrics under vLLM's names with our prefix, or with its own, and those of the process
// (process_metrics.h), served at /metrics.
//
// Fed by the ledger's follower, off the loop; gauges of the queue, and what others count, are read
// at each scrape. Requests that are marked internal (the warm-up) are left out. Thread safety:
// Record from one thread (the follower's); scrapes from the HTTP server's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "net/door.h"
#include "scheduler/ledger.h"
#include "scheduler/request/request_pool.h"
#include "server/access/api_keys.h"
#include "server/http/http_server.h"
#include "server/observe/refusals.h"
#include "server/observe/vllm_metrics.h"
#include "server/session/work_pool.h"

namespace treadle {

struct MetricsOptions {
  MetricsDialect dialect = MetricsDialect::kTreadle;
  int64_t max_context = 0;  // most tokens of a sequence, for buckets of vLLM's
};

class Metrics {
 public:
  // `pool` must outlive the metrics.
  Metrics(const std::string& model_name, const RequestPool& pool, MetricsOptions options = {});
  ~Metrics();

  // Adds others' counts; before Listen. `now` is asked at each scrape, as long as the metrics live,
  // and a counter's never becomes less.
  void AddCounter(const char* name, const char* help, std::function<double()> now);
  void AddGauge(const char* name, const char* help, std::function<double()> now);
  // A gauge that is always 1 and whose labels tell something; before Listen.
  using Labels = std::map<std::string, std::string>;
  void AddInfo(const char* name, const char* help, const Labels& labels);
  // One whose labels change: its value is the time of the scrape, as vLLM has it.
  void AddInfo(const char* name, const char* help, std::function<Labels()> now);
  void Add(std::shared_ptr<const Door::Counts> door);
  void Add(std::shared_ptr<const WorkPool::Counts> work);
  // Refused requests, with those that the gRPC port refuses by itself.
  void Add(std::shared_ptr<const RefusalCounts> refusals, std::shared_ptr<const Door::Counts> door);

  void Record(const LedgerRecord& record);

  // The text that /metrics serves; from any thread.
  std::string Scrape() const;

  // Serves http://`address`/metrics from now on, or https:// with `tls`; port 0 takes any free one.
  // Returns the port. `keys` and `tls`, if given, must outlive the metrics: a scrape needs a valid
  // key as its bearer token.
  absl::StatusOr<int> Listen(const std::string& address, const ApiKeys* keys = nullptr,
                             const SocketTls* tls = nullptr);

 private:
  struct Instruments;
  std::unique_ptr<Instruments> instruments_;
  std::unique_ptr<HttpServer> server_;  // after what it scrapes
};

}  // namespace treadle
