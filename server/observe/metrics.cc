#include "server/observe/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "server/observe/process_metrics.h"
#include "server/observe/token_gaps.h"

namespace treadle {
namespace {

using Bounds = prometheus::Histogram::BucketBoundaries;

Bounds Doubling(double first, double end) {
  Bounds bounds;
  for (double bound = first; bound < end; bound *= 2) bounds.push_back(bound);
  return bounds;
}
// 0.01 * 2^n up to 81.92 s (OpenTelemetry's GenAI conventions); gaps between tokens are shorter.
Bounds Seconds() { return Doubling(0.01, 82); }
Bounds TokenSeconds() { return Doubling(0.00125, 11); }
Bounds Tokens() { return Doubling(1, 200'000); }

// The share of bubbles in a pipeline's last stage, over the iterations that it ran last.
class BubbleShare {
 public:
  double Add(const LedgerRecord& record) {
    window_.push_back({record.bubble, record.compute + record.sample});
    if (window_.size() > kWindow) window_.pop_front();
    double bubble = 0;
    double busy = 0;
    for (const Iteration& iteration : window_) {
      bubble += iteration.bubble;
      busy += iteration.busy;
    }
    return bubble > 0 ? bubble / (bubble + busy) : 0;
  }

 private:
  static constexpr size_t kWindow = 256;
  struct Iteration {
    double bubble, busy;
  };
  std::deque<Iteration> window_;
};

}  // namespace

struct Metrics::Instruments {
  Instruments(const std::string& model_name, const RequestPool& request_pool,
              MetricsOptions metrics_options)
      : options(metrics_options), pool(request_pool), labels{{"model_name", model_name}} {}

  prometheus::Gauge& NewGauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add(labels);
  }
  prometheus::Counter& NewCounter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add(labels);
  }
  // A histogram of ours, and vLLM's of the same name, if the dialect has it.
  struct Histograms {
    prometheus::Histogram& ours;
    prometheus::Histogram* vllm;
    void Observe(double value) const {
      ours.Observe(value);
      if (vllm != nullptr) vllm->Observe(value);
    }
  };
  Histograms NewHistogram(const char* name, const char* help, const Bounds& bounds) {
    const auto make = [&](const std::string& full, const prometheus::Labels& all,
                          const Bounds& buckets) -> prometheus::Histogram& {
      return prometheus::BuildHistogram().Name(full).Help(help).Register(registry).Add(all,
                                                                                       buckets);
    };
    Histograms both{make(name, labels, bounds), nullptr};
    const std::string_view short_name = std::string_view(name).substr(kOurMetrics.size());
    const Bounds vllm_bounds = VllmBuckets(short_name, options.max_context);
    if (options.dialect != MetricsDialect::kTreadle && !vllm_bounds.empty()) {
      prometheus::Labels all = labels;
      all[kVllmEngineLabel] = kVllmEngine;
      both.vllm = &make(Str(kVllmMetrics, short_name), all, vllm_bounds);
    }
    return both;
  }

  // On the HTTP server's thread.
  std::string Scrape() const {
    const PoolLoad load = pool.Load();
    running.Set(static_cast<double>(load.running));
    waiting.Set(static_cast<double>(load.waiting));
    reserved.Set(static_cast<double>(load.reserved));
    {
      MutexLock lock(catching_up);
      for (const auto& catch_up : others) catch_up();
    }
    std::vector<prometheus::MetricFamily> families = registry.Collect();
    if (options.dialect != MetricsDialect::kTreadle) AddVllmCopies(families);
    if (options.dialect == MetricsDialect::kVllm) {
      std::erase_if(families, [](const prometheus::MetricFamily& family) {
        return family.name.starts_with(kOurMetrics);
      });
    }
    AddProcessMetrics(families);
    return prometheus::TextSerializer().Serialize(families);
  }

  const MetricsOptions options;
  const RequestPool& pool;
  const prometheus::Labels labels;
  prometheus::Registry registry;
  std::vector<std::function<void()>> others;  // bring up to date what others count
  mutable Mutex catching_up;                  // held by them

  prometheus::Gauge& running =
      NewGauge("treadle:num_requests_running", "Requests that have had an iteration.");
  prometheus::Gauge& waiting =
      NewGauge("treadle:num_requests_waiting", "Requests that wait for their first iteration.");
  prometheus::Gauge& reserved =
      NewGauge("treadle:num_requests_reserved", "Waiting requests that hold pages already.");
  prometheus::Gauge& kv_usage =
      NewGauge("treadle:kv_cache_usage_perc",
               "Share of the K/V pages in use, of the scarcest kind; 1 is all.");
  prometheus::Gauge& bubble_ratio = NewGauge(
      "treadle:pipeline_bubble_ratio",
      "Share of bubbles (the last stage without work while some was in flight) in the time of the "
      "last 256 iterations.");
  prometheus::Counter& prompt_tokens =
      NewCounter("treadle:prompt_tokens_total", "Prompt tokens of requests that ended.");
  prometheus::Counter& cache_queries = NewCounter("treadle:prefix_cache_queries_total",
                                                  "Prompt tokens of requests that had an answer.");
  prometheus::Counter& cache_hits =
      NewCounter("treadle:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.");
  prometheus::Counter& draft_tokens =
      NewCounter("treadle:spec_decode_num_draft_tokens_total",
                 "Guesses of next tokens that iterations verified, of requests that ended.");
  prometheus::Counter& accepted_tokens = NewCounter("treadle:spec_decode_num_accepted_tokens_total",
                                                    "Verified guesses that were right.");
  prometheus::Counter& generation_tokens =
      NewCounter("treadle:generation_tokens_total", "Generated tokens of requests that ended.");
  prometheus::Family<prometheus::Counter>& success = prometheus::BuildCounter()
                                                         .Name("treadle:request_success_total")
                                                         .Help("Requests that ended, by reason.")
                                                         .Register(registry);
  prometheus::Counter& losses = NewCounter(
      "treadle:engine_losses_total",
      "Times that the engine was lost, as with a worker; those of which iterations came after.");
  const Histograms request_prompt_tokens =
      NewHistogram("treadle:request_prompt_tokens", "Prompt tokens per request.", Tokens());
  const Histograms request_generation_tokens =
      NewHistogram("treadle:request_generation_tokens", "Generated tokens per request.", Tokens());
  const Histograms iteration_tokens =
      NewHistogram("treadle:iteration_tokens_total", "Tokens per iteration.", Tokens());
  const Histograms ttft =
      NewHistogram("treadle:time_to_first_token_seconds", "Arrival to first token.", Seconds());
  const Histograms ttft_error = NewHistogram(
      "treadle:time_to_first_token_error_seconds",
      "Foretold less real time to first token, with --max-ttft.",
      {-40.96, -10.24, -2.56, -0.64, -0.16, -0.04, -0.01, 0.01, 0.04, 0.16, 0.64, 2.56, 10.24});
  const Histograms itl = NewHistogram("treadle:inter_token_latency_seconds",
                                      "Gap between two tokens of a request.", TokenSeconds());
  const Histograms e2e =
      NewHistogram("treadle:e2e_request_latency_seconds", "Arrival to end.", Seconds());
  const Histograms queue_time =
      NewHistogram("treadle:request_queue_time_seconds", "Arrival to first iteration.", Seconds());
  const Histograms prefill_time = NewHistogram("treadle:request_prefill_time_seconds",
                                               "First iteration to first token.", Seconds());
  const Histograms decode_time =
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
    draft_tokens.Increment(end.timings.draft_tokens);
    accepted_tokens.Increment(end.timings.accepted_draft_tokens);
    request_prompt_tokens.Observe(end.prompt_tokens);
    request_generation_tokens.Observe(end.output_tokens);
    e2e.Observe(end.timings.total);
    if (end.output_tokens == 0) return;  // it never began, or brought nothing
    cache_queries.Increment(end.prompt_tokens);
    cache_hits.Increment(end.cached_tokens);
    ttft.Observe(end.timings.first_token);
    if (end.predicted_first_token >= 0) {
      ttft_error.Observe(end.predicted_first_token - end.timings.first_token);
    }
    queue_time.Observe(end.timings.queued);
    prefill_time.Observe(end.timings.first_token - end.timings.queued);
    decode_time.Observe(end.timings.total - end.timings.first_token);
  }

  // This and below: confined to Record.
  TokenGaps token_gaps;
  BubbleShare bubbles;
};

Metrics::Metrics(const std::string& model_name, const RequestPool& pool, MetricsOptions options)
    : instruments_(std::make_unique<Instruments>(model_name, pool, options)) {
  for (const char* reason : {"stop", "length", "cancelled", "deadline", "refused", "error"}) {
    instruments_->Success(reason);
  }
}

Metrics::~Metrics() = default;

void Metrics::AddCounter(const char* name, const char* help, std::function<double()> now) {
  prometheus::Counter& counter = instruments_->NewCounter(name, help);
  instruments_->others.push_back(
      [&counter, now = std::move(now)] { counter.Increment(now() - counter.Value()); });
}

void Metrics::AddGauge(const char* name, const char* help, std::function<double()> now) {
  prometheus::Gauge& gauge = instruments_->NewGauge(name, help);
  instruments_->others.push_back([&gauge, now = std::move(now)] { gauge.Set(now()); });
}

void Metrics::AddInfo(const char* name, const char* help, const Labels& labels) {
  prometheus::BuildGauge()
      .Name(name)
      .Help(help)
      .Register(instruments_->registry)
      .Add(labels)
      .Set(1);
}

void Metrics::AddInfo(const char* name, const char* help, std::function<Labels()> now) {
  auto& family = prometheus::BuildGauge().Name(name).Help(help).Register(instruments_->registry);
  instruments_->others.push_back(
      [&family, now = std::move(now), last = static_cast<prometheus::Gauge*>(nullptr)]() mutable {
        if (last != nullptr) family.Remove(last);
        last = &family.Add(now());
        last->SetToCurrentTime();
      });
}

void Metrics::Add(std::shared_ptr<const Door::Counts> door) {
  AddGauge("treadle:connections", "Clients' connections to the gRPC port.",
           [door] { return static_cast<double>(door->connections); });
  AddGauge("treadle:receive_memory_bytes", "Bytes of messages that have not come whole.",
           [door] { return static_cast<double>(door->held); });
  AddCounter("treadle:connections_turned_away_total",
             "Connections closed for a limit or for their silence.",
             [door] { return static_cast<double>(door->turned_away); });
  AddCounter("treadle:connection_violations_total", "Connections closed for what they sent.",
             [door] { return static_cast<double>(door->violations); });
}

void Metrics::Add(std::shared_ptr<const WorkPool::Counts> work) {
  AddGauge("treadle:num_requests_being_read", "Requests that are parsed, rendered or tokenized.",
           [work] { return static_cast<double>(work->running); });
  AddGauge("treadle:num_requests_unread", "Requests that wait to be read.",
           [work] { return static_cast<double>(work->waiting); });
}

void Metrics::Add(std::shared_ptr<const RefusalCounts> refusals,
                  std::shared_ptr<const Door::Counts> door) {
  // By CallRefusal.
  static constexpr RefusalReason kOfDoor[] = {RefusalReason::kInvalid, RefusalReason::kTooLong,
                                              RefusalReason::kUnreadFull, RefusalReason::kDeadline};
  auto& family = prometheus::BuildCounter()
                     .Name("treadle:requests_refused_total")
                     .Help("Requests refused before they were queued, by reason.")
                     .Register(instruments_->registry);
  for (const auto& [word, reason] : kRefusals) {
    prometheus::Labels labels = instruments_->labels;
    labels["reason"] = word;
    prometheus::Counter& counter = family.Add(labels);
    instruments_->others.push_back([&counter, reason = reason, refusals, door] {
      int64_t now = refusals->Of(reason);
      for (size_t i = 0; i < std::size(kOfDoor); ++i) {
        if (kOfDoor[i] == reason) now += door->refused[i];
      }
      counter.Increment(static_cast<double>(now) - counter.Value());
    });
  }
}

void Metrics::Record(const LedgerRecord& record) {
  Instruments& m = *instruments_;
  int64_t tokens = 0;
  m.token_gaps.BeginRecord();
  for (const LedgerMember& member : record.members) {
    tokens += member.tokens;
    const std::optional<double> gap = m.token_gaps.Observe(member, record.time);
    if (gap.has_value()) m.itl.Observe(*gap);
  }
  if (tokens > 0) {
    m.iteration_tokens.Observe(static_cast<double>(tokens));
    m.bubble_ratio.Set(m.bubbles.Add(record));
  }
  // Epochs count from 1.
  const double lost = static_cast<double>(record.epoch) - 1 - m.losses.Value();
  if (lost > 0) m.losses.Increment(lost);
  if (record.total_pages > 0) {
    m.kv_usage.Set(1.0 - static_cast<double>(record.free_pages) /
                             static_cast<double>(record.total_pages));
  }
  for (const LedgerEnd& end : record.ends) {
    m.token_gaps.End(end.request);
    if (!end.internal) m.RecordEnd(end);
  }
}

std::string Metrics::Scrape() const { return instruments_->Scrape(); }

absl::StatusOr<int> Metrics::Listen(const std::string& address, const ApiKeys* keys,
                                    const SocketTls* tls) {
  const auto answer = [this, keys](const HttpRequest& request, const auto& reply) {
    if (keys != nullptr && !keys->Find(request.Header("authorization")).ok()) {
      return reply->Send({.code = 401, .body = "expected a valid bearer token\n"});
    }
    reply->Send({.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = Scrape()});
  };
  HttpOptions options;
  options.tls = tls;
  options.any_host = keys != nullptr;
  options.body_bytes = 0;    // a scrape has none
  options.connections = 32;  // some scrapers; whoever says nothing makes room
  options.per_address = 32;
  TREADLE_ASSIGN_OR_RETURN(server_,
                           HttpServer::Start(address, options, {{"GET", "/metrics", answer}}));
  return server_->address().port;
}

}  // namespace treadle
