#include "server/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <exception>
#include <unordered_map>

#include "kernels/status.h"

namespace treadle {
namespace {

using Bounds = prometheus::Histogram::BucketBoundaries;

// 0.01 * 2^n up to 81.92 s (OpenTelemetry's GenAI conventions).
Bounds Seconds() {
  Bounds bounds;
  for (double bound = 0.01; bound < 82; bound *= 2) bounds.push_back(bound);
  return bounds;
}
// Gaps between tokens are shorter.
Bounds TokenSeconds() {
  Bounds bounds;
  for (double bound = 0.00125; bound < 11; bound *= 2) bounds.push_back(bound);
  return bounds;
}
Bounds Tokens() {
  Bounds bounds;
  for (double bound = 1; bound < 200'000; bound *= 2) bounds.push_back(bound);
  return bounds;
}

}  // namespace

struct Metrics::Instruments final : prometheus::Collectable {
  Instruments(const std::string& model_name, const RequestPool& request_pool)
      : pool(request_pool), labels{{"model_name", model_name}} {}

  prometheus::Gauge& NewGauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
  }
  prometheus::Counter& NewCounter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add(labels);
  }
  prometheus::Histogram& NewHistogram(const char* name, const char* help, const Bounds& bounds) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(labels,
                                                                                     bounds);
  }

  // On the exposer's thread.
  std::vector<prometheus::MetricFamily> Collect() const override {
    const PoolLoad load = pool.Load();
    running.Set(static_cast<double>(load.running));
    waiting.Set(static_cast<double>(load.waiting));
    return registry.Collect();
  }

  const RequestPool& pool;
  const prometheus::Labels labels;
  prometheus::Registry registry;

  prometheus::Gauge& running =
      NewGauge("treadle:num_requests_running", "Requests that hold pages and generate.");
  prometheus::Gauge& waiting =
      NewGauge("treadle:num_requests_waiting", "Requests that wait for admission.");
  prometheus::Gauge& kv_usage =
      NewGauge("treadle:kv_cache_usage_perc", "Share of the K/V pages in use; 1 is all.");
  prometheus::Counter& prompt_tokens =
      NewCounter("treadle:prompt_tokens_total", "Prompt tokens of requests that ended.");
  prometheus::Counter& generation_tokens =
      NewCounter("treadle:generation_tokens_total", "Generated tokens of requests that ended.");
  prometheus::Family<prometheus::Counter>& success = prometheus::BuildCounter()
                                                         .Name("treadle:request_success_total")
                                                         .Help("Requests that ended, by reason.")
                                                         .Register(registry);
  prometheus::Histogram& request_prompt_tokens =
      NewHistogram("treadle:request_prompt_tokens", "Prompt tokens per request.", Tokens());
  prometheus::Histogram& request_generation_tokens =
      NewHistogram("treadle:request_generation_tokens", "Generated tokens per request.", Tokens());
  prometheus::Histogram& iteration_tokens =
      NewHistogram("treadle:iteration_tokens_total", "Tokens per iteration.", Tokens());
  prometheus::Histogram& ttft =
      NewHistogram("treadle:time_to_first_token_seconds", "Arrival to first token.", Seconds());
  prometheus::Histogram& itl = NewHistogram("treadle:inter_token_latency_seconds",
                                            "Gap between two tokens of a request.", TokenSeconds());
  prometheus::Histogram& e2e =
      NewHistogram("treadle:e2e_request_latency_seconds", "Arrival to end.", Seconds());
  prometheus::Histogram& queue_time =
      NewHistogram("treadle:request_queue_time_seconds", "Arrival to admission.", Seconds());
  prometheus::Histogram& prefill_time =
      NewHistogram("treadle:request_prefill_time_seconds", "Admission to first token.", Seconds());
  prometheus::Histogram& decode_time =
      NewHistogram("treadle:request_decode_time_seconds", "First token to end.", Seconds());

  prometheus::Counter& Success(const std::string& reason) {
    prometheus::Labels all = labels;
    all["finished_reason"] = reason;
    return success.Add(all);
  }

  void RecordEnd(const LedgerEnd& end) {
    Success(end.reason).Increment();
    prompt_tokens.Increment(end.prompt_tokens);
    generation_tokens.Increment(end.output_tokens);
    request_prompt_tokens.Observe(end.prompt_tokens);
    request_generation_tokens.Observe(end.output_tokens);
    e2e.Observe(end.timings.total);
    if (end.output_tokens == 0) return;  // it never began, or brought nothing
    ttft.Observe(end.timings.first_token);
    queue_time.Observe(end.timings.queued);
    prefill_time.Observe(end.timings.first_token - end.timings.queued);
    decode_time.Observe(end.timings.total - end.timings.first_token);
  }

  // When each running request was last in an iteration, in the ledger's time. Confined to Record.
  std::unordered_map<RequestId, double> last_seen;
};

struct Metrics::Server {
  explicit Server(const std::string& address) : exposer(address, /*num_threads=*/1) {}
  prometheus::Exposer exposer;
};

Metrics::Metrics(const std::string& model_name, const RequestPool& pool)
    : instruments_(std::make_shared<Instruments>(model_name, pool)) {
  for (const char* reason : {"stop", "length", "cancelled", "deadline", "error"}) {
    instruments_->Success(reason);
  }
}

Metrics::~Metrics() = default;

void Metrics::Record(const LedgerRecord& record) {
  Instruments& m = *instruments_;
  int64_t tokens = 0;
  for (const LedgerMember& member : record.members) {
    tokens += member.tokens;
    auto [seen, first] = m.last_seen.try_emplace(member.request, record.time);
    if (!first && !member.initiation) m.itl.Observe(record.time - seen->second);
    seen->second = record.time;
  }
  if (tokens > 0) m.iteration_tokens.Observe(static_cast<double>(tokens));
  if (record.total_pages > 0) {
    m.kv_usage.Set(1.0 - static_cast<double>(record.free_pages) /
                             static_cast<double>(record.total_pages));
  }
  for (const LedgerEnd& end : record.ends) {
    m.last_seen.erase(end.request);
    m.RecordEnd(end);
  }
}

absl::StatusOr<int> Metrics::Listen(const std::string& address) {
  try {
    server_ = std::make_unique<Server>(address);
    server_->exposer.RegisterCollectable(instruments_, "/metrics");
    return server_->exposer.GetListeningPorts().front();
  } catch (const std::exception& error) {
    server_.reset();
    return absl::UnavailableError(
        Str("cannot listen on ", address, " for metrics: ", error.what()));
  }
}

}  // namespace treadle
