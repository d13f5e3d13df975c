// Figures of a load run, with the names that `vllm bench serve` gives them, plus ORCA's normalized
// latency: end-to-end latency divided by generated tokens (section 6.2). Pure functions.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bench/load/load_replay.h"

namespace treadle {

// By linear interpolation between order statistics (numpy's default). 0 if there are none.
double Percentile(const std::vector<double>& sorted, double percent);

struct LoadReport {
  double duration = 0;
  int64_t completed = 0;
  int64_t failed = 0;
  int64_t total_input_tokens = 0;
  int64_t total_output_tokens = 0;
  double request_throughput = 0;
  double output_throughput = 0;
  double total_token_throughput = 0;
  int64_t good = -1;   // requests within every goodput bound; -1: no bound given
  double goodput = 0;  // the same per second
  // Milliseconds, by name: ttft, tpot, itl, e2el, normalized_latency.
  std::map<std::string, std::vector<double>> samples_ms;
};

// `goodput`: upper bounds in ms by the names above.
LoadReport Analyze(const LoadResult& result, const std::map<std::string, double>& goodput);

// The whole report as JSON: summary keys, and the per-request lists (input_lens, output_lens,
// ttfts, itls, errors) if `details`. `extra` is merged at the top (what was run).
std::string ToJson(const LoadReport& report, const LoadResult& result, bool details,
                   const std::vector<double>& percentiles,
                   const std::map<std::string, std::string>& extra);
std::string ToTable(const LoadReport& report, const std::vector<double>& percentiles);

}  // namespace treadle
