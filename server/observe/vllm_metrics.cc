#include "server/observe/vllm_metrics.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>

#include <algorithm>
#include <utility>

namespace treadle {
namespace {

using enum VllmMetric::Buckets;

constexpr VllmMetric kMetrics[] = {
    {"num_requests_running"},
    {"num_requests_waiting"},
    {"kv_cache_usage_perc"},
    {"prompt_tokens_total"},
    {"generation_tokens_total"},
    {"prefix_cache_queries_total"},
    {"prefix_cache_hits_total"},
    {"spec_decode_num_draft_tokens_total"},
    {"spec_decode_num_accepted_tokens_total"},
    {"request_success_total"},
    {"request_prompt_tokens", kTokens},
    {"request_generation_tokens", kTokens},
    {"iteration_tokens_total", kIteration},
    {"time_to_first_token_seconds", kFirstToken},
    {"inter_token_latency_seconds", kToken},
    {"e2e_request_latency_seconds", kLatency},
    {"request_queue_time_seconds", kLatency},
    {"request_prefill_time_seconds", kLatency},
    {"request_decode_time_seconds", kLatency},
};

// vLLM's reasons for ours.
constexpr std::pair<std::string_view, std::string_view> kReasons[] = {
    {"stop", "stop"},      {"length", "length"}, {"cancelled", "abort"},
    {"deadline", "abort"}, {"refused", "error"}, {"error", "error"}};

using Metric = prometheus::ClientMetric;

// With vLLM's labels; metrics that then have the same ones are one.
prometheus::MetricFamily VllmCopy(const prometheus::MetricFamily& ours) {
  prometheus::MetricFamily copy = ours;
  copy.name = std::string(kVllmMetrics) + copy.name.substr(kOurMetrics.size());
  copy.metric.clear();
  for (Metric metric : ours.metric) {
    for (Metric::Label& label : metric.label) {
      if (label.name != "finished_reason") continue;
      const auto reason = std::ranges::find(kReasons, label.value,
                                            &std::pair<std::string_view, std::string_view>::first);
      if (reason != std::end(kReasons)) label.value = reason->second;
    }
    metric.label.push_back({kVllmEngineLabel, kVllmEngine});
    const auto same = std::ranges::find(copy.metric, metric.label, &Metric::label);
    if (same == copy.metric.end()) {
      copy.metric.push_back(std::move(metric));
    } else {
      same->counter.value += metric.counter.value;
    }
  }
  return copy;
}

}  // namespace

std::span<const VllmMetric> VllmMetrics() { return kMetrics; }

std::vector<double> VllmBuckets(std::string_view name, int64_t max_context) {
  const auto metric = std::ranges::find(kMetrics, name, &VllmMetric::name);
  switch (metric == std::end(kMetrics) ? kNone : metric->buckets) {
    case kNone:
      return {};
    case kTokens: {  // 1, 2, 5, 10, 20, 50 ...
      std::vector<double> bounds;
      for (double power = 1;; power *= 10) {
        for (const double step : {1, 2, 5}) {
          if (step * power > static_cast<double>(max_context)) return bounds;
          bounds.push_back(step * power);
        }
      }
    }
    case kIteration:
      return {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
    case kFirstToken:
      return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
              1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
    case kToken:
      return {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
              0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
    case kLatency:
      return {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
              30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
  }
  return {};
}

void AddVllmCopies(std::vector<prometheus::MetricFamily>& families) {
  std::vector<prometheus::MetricFamily> copies;
  for (const prometheus::MetricFamily& family : families) {
    if (!family.name.starts_with(kOurMetrics)) continue;
    const auto metric = std::ranges::find(
        kMetrics, std::string_view(family.name).substr(kOurMetrics.size()), &VllmMetric::name);
    if (metric != std::end(kMetrics) && metric->buckets == kNone) {
      copies.push_back(VllmCopy(family));
    }
  }
  std::ranges::move(copies, std::back_inserter(families));
}

}  // namespace treadle
