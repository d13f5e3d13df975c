// Metrics of ours under the names, labels and buckets of vLLM (vllm/v1/metrics/loggers.py), for
// dashboards, gateways and alerts that were made for it.
//
// Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/choice.h"

namespace prometheus {
struct MetricFamily;
}

namespace treadle {

enum class MetricsDialect : uint8_t { kTreadle, kVllm, kBoth };
inline constexpr Choice<MetricsDialect> kMetricsDialects[] = {{"treadle", MetricsDialect::kTreadle},
                                                              {"vllm", MetricsDialect::kVllm},
                                                              {"both", MetricsDialect::kBoth}};

inline constexpr std::string_view kOurMetrics = "treadle:", kVllmMetrics = "vllm:";

// One metric that vLLM has under the same name behind its own prefix.
struct VllmMetric {
  std::string_view name;  // without the prefix
  enum class Buckets : uint8_t { kNone, kTokens, kIteration, kFirstToken, kToken, kLatency };
  Buckets buckets = Buckets::kNone;  // none: it is no histogram
};
std::span<const VllmMetric> VllmMetrics();

// The bounds of vLLM's histogram of that name; empty: vLLM has no such histogram. `max_context`:
// the most tokens of a sequence, up to which lengths are told apart.
std::vector<double> VllmBuckets(std::string_view name, int64_t max_context);

// vLLM's label for what is one of several engines, and its value here.
inline constexpr char kVllmEngineLabel[] = "engine", kVllmEngine[] = "0";

// Appends a copy, as vLLM has it, of each family of ours that is a counter or gauge of vLLM's.
void AddVllmCopies(std::vector<prometheus::MetricFamily>& families);

}  // namespace treadle
