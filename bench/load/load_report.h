// Figures of a load run, with the names that `vllm bench serve` gives them, plus ORCA's normalized
// latency: end-to-end latency divided by generated tokens (section 6.2). Pure functions.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/load/load_replay.h"

namespace treadle {

// By linear interpolation between order statistics (numpy's default). 0 if there are none.
double Percentile(const std::vector<double>& sorted, double percent);

struct LoadReportOptions {
  std::map<std::string, double> goodput = {};  // upper bounds in ms: ttft, tpot, itl, e2el
  // Above 0: the steady state alone counts. Latencies are those of requests that arrive in it,
  // throughput is what ends in it: from this many seconds on until the last arrival.
  double steady_from = 0;
  std::vector<double> percentiles = {90, 99};
};

struct LoadReport {
  double duration = 0;
  int64_t completed = 0;
  int64_t failed = 0;
  int64_t total_input_tokens = 0;
  int64_t total_output_tokens = 0;
  double request_throughput = 0;
  double output_throughput = 0;
  double total_token_throughput = 0;
  double max_output_tokens_per_s = 0;  // of the run's seconds, the one with most
  int64_t max_concurrent_requests = 0;
  int64_t good = -1;   // requests within every goodput bound; -1: no bound given
  double goodput = 0;  // the same per second
  // Milliseconds, by name: ttft, tpot, itl, e2el, normalized_latency, client_lag.
  std::map<std::string, std::vector<double>> samples_ms;
  // The client's own lag is more than 1 ms and 5 % of the median time to first token for a
  // hundredth of the requests: latencies are partly its own.
  bool client_was_late = false;
};

// The bounds of --goodput, as "ttft:500". Errors: the one that is wrong.
absl::StatusOr<std::map<std::string, double>> ParseGoodput(const std::vector<std::string>& bounds);

LoadReport Analyze(const LoadResult& result, const LoadReportOptions& options);

// The report behind what `about` says (what was run): summary keys, and lists of the requests if
// `details`. Times of requests are seconds from the start of the run; `start_times` are the
// scheduled arrivals, from which latencies count, and `queue_times` what passed until a request was
// sent.
nlohmann::ordered_json ToJson(const LoadReport& report, const LoadResult& result, bool details,
                              const LoadReportOptions& options, nlohmann::ordered_json about);
std::string ToTable(const LoadReport& report, const LoadReportOptions& options);

// The mean over runs of each number that all `reports` (ToJson) have, and beside it as ci95_NAME
// half the width of its 95 % confidence interval, by Student's t; other members are the first
// run's. REQUIRES: two runs or more.
nlohmann::ordered_json MeanOverSeeds(const std::vector<nlohmann::ordered_json>& reports);
std::string ToTable(const nlohmann::ordered_json& means);

}  // namespace treadle
