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
  void SetMasks(uint64_t, uint64_t, std::vector<StepMask>) override {}
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
      if (plan.steps[i].sample) result.steps[i].token = 1;
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

}  // namespace

absl::StatusOr<std::vector<SchedulerBenchRow>> RunSchedulerBench(
    const SchedulerBenchOptions& options) {
  std::vector<SchedulerBenchRow> rows;
  for (const int32_t running : options.running) {
    double best = 0;
    for (int i = 0; i < options.repeats; ++i) {
      TREADLE_ASSIGN_OR_RETURN(const double seconds, Measure(running, options));
      best = i == 0 ? seconds : std::min(best, seconds);
    }
    rows.push_back({running, 1e6 * best});
  }
  return rows;
}

std::string ToJson(const std::vector<SchedulerBenchRow>& rows) {
  std::string out = "[";
  for (const SchedulerBenchRow& row : rows) {
    out += Str(out.size() > 1 ? ",\n " : "", "{\"running\": ", row.running,
               ", \"microseconds_per_iteration\": ", row.microseconds_per_iteration, "}");
  }
  return out + "]\n";
}

std::string ToTable(const std::vector<SchedulerBenchRow>& rows) {
  std::string out = "running   us/iteration\n";
  for (const SchedulerBenchRow& row : rows) {
    absl::StrAppendFormat(&out, "%7d   %12.2f\n", row.running, row.microseconds_per_iteration);
  }
  return out;
}

}  // namespace treadle
