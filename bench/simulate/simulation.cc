#include "bench/simulate/simulation.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <utility>

#include "base/status.h"
#include "bench/simulate/virtual_engine.h"
#include "engine/kv/kv_slot_manager.h"
#include "scheduler/loop_core.h"

namespace treadle {
namespace {

constexpr int32_t kVocab = 32000;
constexpr double kNever = std::numeric_limits<double>::infinity();

absl::Status CheckTrace(const std::vector<TraceEntry>& trace, const SimulationOptions& options) {
  double before = 0;
  for (size_t i = 0; i < trace.size(); ++i) {
    const TraceEntry& entry = trace[i];
    const int64_t tokens = int64_t{entry.input_tokens} + entry.output_tokens;
    const auto refuse = [&](const auto&... what) {
      return InvalidArgument("request ", i + 1, " of the trace ", what...);
    };
    if (entry.input_tokens < 1 || entry.output_tokens < 1) {
      return refuse("has ", entry.input_tokens, " prompt tokens and ", entry.output_tokens,
                    " to generate, expected at least one of each");
    }
    if (!(entry.arrival >= before)) {
      return refuse("arrives at ", entry.arrival, " s, before the one ahead of it (", before,
                    " s); expected times that never go back");
    }
    before = entry.arrival;
    if (options.limits.max_context > 0 && tokens > options.limits.max_context) {
      return refuse("has ", tokens, " tokens, expected at most the context of ",
                    options.limits.max_context);
    }
    const PageCounts need = options.paging.PagesFor(tokens);
    if (!need.FitsIn(options.pages)) {
      return refuse("needs ", need, " pages of the K/V cache, which has ", options.pages);
    }
  }
  return absl::OkStatus();
}

class Run {
 public:
  Run(const std::vector<TraceEntry>& trace, const SimulationOptions& options,
      std::unique_ptr<Policy> policy)
      : trace_(trace),
        options_(options),
        policy_(std::move(policy)),
        engine_(clock_, {.stages = options.limits.stages,
                         .depth = options.limits.depth,
                         .hop = options.hop,
                         .seconds = [this](const IterationPlan& plan,
                                           int stage) { return Seconds(plan, stage); }}),
        kv_(options.pages, options.paging, options.pages),
        pool_(std::max<int64_t>(1, std::ssize(trace))),
        loop_(engine_, kv_, pool_, *policy_, ledger_, clock_,
              {.limits = options.limits, .heartbeat = kNoHeartbeat}),
        random_(options.seed) {
    result_.load.requests.resize(trace.size());
    streams_.resize(trace.size());
  }

  absl::StatusOr<SimulationResult> All() {
    size_t next = 0;
    while (next < trace_.size() || left_ > 0) {
      const double arrival = next < trace_.size() ? trace_[next].arrival : kNever;
      const double time = std::min(arrival, engine_.NextDone().value_or(kNever));
      if (time == kNever)
        return absl::InternalError(Str(left_, " requests wait, and nothing runs"));
      clock_.Set(time);
      for (; next < trace_.size() && trace_[next].arrival <= time; ++next) {
        TREADLE_RETURN_IF_ERROR(Arrive(next));
      }
      while (loop_.Turn()) {
      }
    }
    const double begin = trace_.empty() ? 0 : trace_.front().arrival;
    result_.load.duration = clock_.seconds() - begin;
    result_.iterations = engine_.iterations();
    if (result_.load.duration > 0) {
      result_.busy = engine_.busy() / (result_.load.duration * options_.limits.stages);
    }
    return std::move(result_);
  }

 private:
  static constexpr std::chrono::hours kNoHeartbeat{24 * 365};

  // The policy was asked for this plan just now, so its padding is this plan's.
  double Seconds(const IterationPlan& plan, int stage) {
    if (stage == 0) {
      result_.rows += plan.num_tokens();
      result_.padding += policy_->padding();
    }
    return options_.seconds(plan, policy_->padding(), stage);
  }

  absl::Status Arrive(size_t index) {
    const TraceEntry& entry = trace_[index];
    RequestSpec spec;
    spec.prompt.resize(entry.input_tokens);
    for (int32_t& token : spec.prompt) token = static_cast<int32_t>(random_() % kVocab);
    spec.max_new_tokens = entry.output_tokens;
    TREADLE_ASSIGN_OR_RETURN(const RequestPool::Submitted submitted, pool_.Submit(std::move(spec)));
    ++left_;
    LoadRecord& record = result_.load.requests[index];
    record.scheduled = entry.arrival;
    record.input_tokens = entry.input_tokens;
    streams_[index] = submitted.stream;
    submitted.stream->SetNotifier([this, &record, stream = submitted.stream.get()] {
      const StreamBatch batch = stream->Take();
      for (const StreamToken& token : batch.tokens) {
        if (token.token >= 0) record.token_times.push_back(clock_.seconds());
      }
      if (!batch.ended) return;
      record.output_tokens = static_cast<int32_t>(record.token_times.size());
      record.end = clock_.seconds();
      if (!batch.status.ok()) record.error = std::string(batch.status.message());
      --left_;
    });
    return absl::OkStatus();
  }

  const std::vector<TraceEntry>& trace_;
  const SimulationOptions& options_;
  SimulationResult result_;
  int64_t left_ = 0;  // requests that came and did not end
  VirtualClock clock_;
  const std::unique_ptr<Policy> policy_;
  VirtualEngine engine_;
  KvSlotManager kv_;
  RequestPool pool_;
  Ledger ledger_{1};
  LoopCore loop_;
  std::mt19937_64 random_;
  std::vector<std::shared_ptr<TokenStream>> streams_;
};

}  // namespace

absl::StatusOr<SimulationResult> Simulate(const std::vector<TraceEntry>& trace,
                                          const SimulationOptions& options) {
  TREADLE_RETURN_IF_ERROR(CheckTrace(trace, options));
  const BatchLimits& limits = options.limits;
  if (limits.max_batch_size < 1 || limits.max_batch_tokens <= limits.max_batch_size) {
    return InvalidArgument("max batch tokens is ", limits.max_batch_tokens, " and max batch size ",
                           limits.max_batch_size,
                           ", expected a size of at least 1 and more tokens than that");
  }
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Policy> policy, Policy::Create(options.policy));
  return Run(trace, options, std::move(policy)).All();
}

}  // namespace treadle
