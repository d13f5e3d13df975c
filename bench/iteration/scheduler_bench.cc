#include "bench/iteration/scheduler_bench.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/status.h"
#include "scheduler/loop_core.h"

namespace treadle {
namespace {

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Every plan is done at once, and every sample is token 1. Counts the time spent in it.
class IdleEngine final : public Engine {
 public:
  absl::Status Start(std::function<void()>) override { return absl::OkStatus(); }
  int stages() const override { return 1; }
  int depth() const override { return 2; }
  uint64_t epoch() const override { return 1; }
  bool HasRoom() const override { return static_cast<int>(results_.size()) < depth(); }
  absl::Status status() const override { return absl::OkStatus(); }
  void Restart() override {}
  void SetMasks(uint64_t, uint64_t, std::vector<OutputMask>) override {}
  void SetTracing(bool) override {}
  std::vector<TraceEvent> TakeTrace() override { return {}; }

  void Submit(IterationPlan plan) override {
    const Clock::time_point before = Clock::now();
    IterationResult result;
    result.epoch = plan.epoch;
    result.iteration = plan.iteration;
    result.steps.resize(plan.steps.size());
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      result.steps[i].sequence = plan.steps[i].sequence;
      for (const RowOutput& asked : plan.steps[i].outputs) {
        result.steps[i].outputs.push_back({.token = asked.sample ? 1 : -1});
      }
    }
    results_.push_back(std::move(result));
    busy_ += Clock::now() - before;
  }
  // One at a time: the steady state has a plan in flight while the loop works.
  std::vector<IterationResult> TakeResults() override {
    const Clock::time_point before = Clock::now();
    std::vector<IterationResult> taken;
    if (!results_.empty()) {
      taken.push_back(std::move(results_.front()));
      results_.erase(results_.begin());
      ++iterations_;
    }
    busy_ += Clock::now() - before;
    return taken;
  }

  double busy() const { return Seconds(busy_); }
  int64_t iterations() const { return iterations_; }

 private:
  std::vector<IterationResult> results_;
  Clock::duration busy_{};
  int64_t iterations_ = 0;
};

// Seconds per iteration, once.
absl::StatusOr<double> Measure(int32_t running, const SchedulerBenchOptions& options) {
  constexpr int64_t kPageSize = 32;
  constexpr int64_t kWarmUp = 100;
  const auto new_tokens = static_cast<int32_t>(options.iterations + 2 * kWarmUp);
  const int64_t pages = (new_tokens + kPageSize) / kPageSize + 1;
  IdleEngine engine;
  KvSlotManager kv(pages * running, kPageSize);
  RequestPool pool(running + options.waiting);
  Ledger ledger;
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Policy> policy, Policy::Create("fcfs"));
  LoopCore::Options loop_options;
  loop_options.limits = {.max_batch_size = running, .max_batch_tokens = 16 * running + 1};
  LoopCore loop(engine, kv, pool, *policy, ledger, TimeSource::Steady(), loop_options);

  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int64_t i = 0; i < running + options.waiting; ++i) {
    RequestSpec spec;
    spec.prompt.assign(8, 1);
    spec.max_new_tokens = new_tokens;
    spec.end_tokens = {2};
    TREADLE_ASSIGN_OR_RETURN(RequestPool::Submitted submitted, pool.Submit(std::move(spec)));
    streams.push_back(std::move(submitted.stream));
  }
  while (engine.iterations() < kWarmUp) loop.Turn();

  const int64_t first = engine.iterations();
  const double busy = engine.busy();
  double clients = 0;
  const Clock::time_point began = Clock::now();
  while (engine.iterations() < first + options.iterations) {
    loop.Turn();
    const Clock::time_point before = Clock::now();
    for (const auto& stream : streams) stream->Take();
    clients += Seconds(Clock::now() - before);
  }
  const double total = Seconds(Clock::now() - began);
  return (total - clients - (engine.busy() - busy)) / static_cast<double>(options.iterations);
}

// Microseconds that the cache adds to a request, as the planner uses it.
double MeasurePrefix(bool found, const SchedulerBenchOptions& options) {
  constexpr int64_t kPageSize = 32, kRequests = 50, kChunk = kDefaultBatchTokens;
  constexpr int64_t kPrompt = SchedulerBenchReport::kPromptTokens;
  const auto measure = [&](const PageCounts& most_idle) {
    KvSlotManager kv(4 * kPrompt / kPageSize, {.page_size = kPageSize}, most_idle);
    std::vector<int32_t> prompt(kPrompt, 1);
    const std::span<const int32_t> ids(prompt);
    const KvSlotManager::Prefix before{"salt", ids.first(kPrompt - 1)};
    Clock::duration spent{};
    for (int64_t request = 0; request <= kRequests; ++request) {
      if (!found) prompt[0] = static_cast<int32_t>(request);
      const Clock::time_point began = Clock::now();
      kv.Find(before);  // by the policy
      std::vector<SequencePages> pages = *kv.Admit(kPrompt, kPrompt + 1, 1, before);
      SequencePages* const tables[] = {pages.data()};
      for (int64_t end = kv.ShareKept(before, tables); end < kPrompt;) {
        end = std::min(end + kChunk, kPrompt);
        kv.Keep({"salt", ids.first(std::min(end, kPrompt - 1))}, pages[0], {0, end});
      }
      kv.KeepAndRelease({"salt", ids}, pages[0], {0, kPrompt});
      if (request > 0) spent += Clock::now() - began;  // the first warms up, and leaves its pages
    }
    return 1e6 * Seconds(spent) / kRequests;
  };
  double best = 0;
  for (int i = 0; i < options.repeats; ++i) {
    const double added = measure(4 * kPrompt / kPageSize) - measure({});
    best = i == 0 ? added : std::min(best, added);
  }
  return best;
}

}  // namespace

absl::StatusOr<SchedulerBenchReport> RunSchedulerBench(const SchedulerBenchOptions& options) {
  SchedulerBenchReport report;
  for (const int32_t running : options.running) {
    double best = 0;
    for (int i = 0; i < options.repeats; ++i) {
      TREADLE_ASSIGN_OR_RETURN(const double seconds, Measure(running, options));
      best = i == 0 ? seconds : std::min(best, seconds);
    }
    report.rows.push_back({running, 1e6 * best});
  }
  report.microseconds_found = MeasurePrefix(true, options);
  report.microseconds_not_found = MeasurePrefix(false, options);
  return report;
}

std::string ToJson(const SchedulerBenchReport& report) {
  std::string rows;
  for (const SchedulerBenchReport::Row& row : report.rows) {
    rows += Str(rows.empty() ? "" : ",\n  ", "{\"running\": ", row.running,
                ", \"microseconds_per_iteration\": ", row.microseconds_per_iteration, "}");
  }
  return Str("{\"iterations\": [", rows,
             "],\n \"prefix_cache\": {\"prompt_tokens\": ", report.kPromptTokens,
             ", \"microseconds_found\": ", report.microseconds_found,
             ", \"microseconds_not_found\": ", report.microseconds_not_found, "}}\n");
}

std::string ToTable(const SchedulerBenchReport& report) {
  std::string out = "running   us/iteration\n";
  for (const SchedulerBenchReport::Row& row : report.rows) {
    absl::StrAppendFormat(&out, "%7d   %12.2f\n", row.running, row.microseconds_per_iteration);
  }
  absl::StrAppendFormat(&out,
                        "prefix cache, us added to a request of %d tokens: %.1f if they are found, "
                        "%.1f if not\n",
                        report.kPromptTokens, report.microseconds_found,
                        report.microseconds_not_found);
  return out;
}

}  // namespace treadle
