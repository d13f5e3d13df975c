#include "engine/remote/remote_engine.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/fingerprint.h"
#include "engine/remote/plan_messages.h"
#include "engine/remote/thread_priority.h"
#include "engine/remote/worker_cluster.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

class ClusterEngine final : public Engine {
 public:
  ClusterEngine(const RemoteEngineOptions& options, std::string fingerprint)
      : stages_(static_cast<int>(options.stages.size())),
        depth_(options.depth > 0 ? options.depth : std::max(stages_, 2)),
        deadline_(options.iteration_deadline),
        vocab_(options.checkpoint->config().vocab),
        cluster_(options, std::move(fingerprint),
                 {.result = [this](const control::ResultMessage& result) { OnResult(result); },
                  .news = [this] { Wake(); },
                  .beat =
                      [this] {
                        if (EnforceDeadline()) Wake();
                      }}) {}

  WorkerCluster& cluster() { return cluster_; }

  absl::Status Start(std::function<void()> wake) override {
    MutexLock lock(wake_mutex_);
    TREADLE_CHECK(!wake_);
    wake_ = std::move(wake);
    return absl::OkStatus();
  }

  int stages() const override { return stages_; }
  int depth() const override { return depth_; }
  uint64_t epoch() const override {
    MutexLock lock(mutex_);
    return epoch_;
  }

  bool HasRoom() const override {
    EnforceDeadline();
    {
      MutexLock lock(wake_mutex_);
      if (!wake_) return false;
    }
    if (!cluster_.standing()) return false;
    MutexLock lock(mutex_);
    return static_cast<int>(in_flight_.size() + results_.size()) < depth_;
  }

  void Submit(IterationPlan plan) override;
  std::vector<IterationResult> TakeResults() override;

  absl::Status status() const override {
    EnforceDeadline();
    return cluster_.status();
  }

  void Restart() override {
    uint64_t epoch = 0;
    {
      MutexLock lock(mutex_);
      epoch = ++epoch_;
      next_iteration_ = 0;
      in_flight_.clear();
      results_.clear();
    }
    cluster_.BeginEpoch(epoch);
  }

  void SetTracing(bool on) override { cluster_.SetTracing(on); }
  std::vector<TraceEvent> TakeTrace() override { return cluster_.TakeTrace(); }

 private:
  // What a result must answer to.
  struct InFlight {
    uint64_t iteration = 0;
    std::vector<std::pair<SequenceId, bool>> steps;  // and whether it samples
  };

  void OnResult(const control::ResultMessage& message);
  absl::Status CheckResult(const IterationResult& result) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EnforceDeadline() const;
  void Wake() {
    MutexLock lock(wake_mutex_);
    if (wake_) wake_();
  }

  const int stages_;
  const int depth_;
  const std::chrono::milliseconds deadline_;
  const int64_t vocab_;

  mutable Mutex wake_mutex_;
  std::function<void()> wake_ ABSL_GUARDED_BY(wake_mutex_);

  mutable Mutex mutex_;                         // never held while the cluster is called
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_) = 1;  // 0 is what a plan that nobody filled in says
  uint64_t next_iteration_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<InFlight> in_flight_ ABSL_GUARDED_BY(mutex_);  // without a result
  std::vector<IterationResult> results_ ABSL_GUARDED_BY(mutex_);
  // Since when the first of in_flight_ has been the first.
  SteadyClock::time_point first_since_ ABSL_GUARDED_BY(mutex_);

  mutable WorkerCluster cluster_;  // last: it calls back
};

void ClusterEngine::Submit(IterationPlan plan) {
  if (!cluster_.status().ok()) return;  // the epoch ended between HasRoom and here
  TREADLE_CHECK(cluster_.standing() || !cluster_.status().ok());
  control::PlanMessage message;
  EncodePlan(plan, message);
  absl::Status wrong;
  uint64_t epoch = 0;
  {
    MutexLock lock(mutex_);
    TREADLE_CHECK(static_cast<int>(in_flight_.size() + results_.size()) < depth_);
    epoch = epoch_;
    if (plan.epoch != epoch_ || plan.iteration != next_iteration_) {
      wrong = InvalidArgument("plan of epoch ", plan.epoch, ", iteration ", plan.iteration,
                              "; expected epoch ", epoch_, ", iteration ", next_iteration_);
    } else {
      if (in_flight_.empty()) first_since_ = SteadyClock::now();
      InFlight entry{next_iteration_++, {}};
      for (const Step& step : plan.steps) entry.steps.emplace_back(step.sequence, step.sample);
      in_flight_.push_back(std::move(entry));
    }
  }
  if (!wrong.ok()) return cluster_.EndEpoch(epoch, std::move(wrong));
  cluster_.SendPlan(std::move(message));
}

std::vector<IterationResult> ClusterEngine::TakeResults() {
  EnforceDeadline();
  if (!cluster_.status().ok()) return {};
  MutexLock lock(mutex_);
  return std::exchange(results_, {});
}

// On a thread of gRPC's.
void ClusterEngine::OnResult(const control::ResultMessage& message) {
  absl::StatusOr<IterationResult> result = DecodeResult(message);
  uint64_t epoch = 0;
  absl::Status wrong = result.status();
  {
    MutexLock lock(mutex_);
    if (message.epoch() != epoch_) return;  // of an old one
    epoch = epoch_;
    if (result.ok()) wrong = CheckResult(*result);
    if (wrong.ok()) {
      in_flight_.pop_front();
      first_since_ = SteadyClock::now();
      results_.push_back(*std::move(result));
    }
  }
  if (!wrong.ok()) {
    cluster_.EndEpoch(epoch, absl::DataLossError(Str("a result of stage ", stages_ - 1, ": ",
                                                     std::string(wrong.message()))));
  }
  Wake();
}

// Whether it answers the first plan in flight.
absl::Status ClusterEngine::CheckResult(const IterationResult& result) const {
  if (in_flight_.empty() || in_flight_.front().iteration != result.iteration) {
    return InvalidArgument("it is of iteration ", result.iteration, ", expected ",
                           in_flight_.empty() ? next_iteration_ : in_flight_.front().iteration);
  }
  const auto& asked = in_flight_.front().steps;
  if (result.steps.size() != asked.size()) {
    return InvalidArgument("it has ", result.steps.size(), " steps, expected ", asked.size());
  }
  for (size_t i = 0; i < asked.size(); ++i) {
    const StepResult& step = result.steps[i];
    const auto& [sequence, sample] = asked[i];
    const bool token_fits = sample ? step.token >= 0 && step.token < vocab_ : step.token == -1;
    if (step.sequence == sequence && token_fits) continue;
    return InvalidArgument("step ", i, " is of sequence ", step.sequence, " with token ",
                           step.token, ", expected sequence ", sequence);
  }
  return absl::OkStatus();
}

// Ends the epoch if its first plan in flight is late; true if it did.
bool ClusterEngine::EnforceDeadline() const {
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  {
    MutexLock lock(mutex_);
    if (in_flight_.empty() || SteadyClock::now() - first_since_ <= deadline_) return false;
    epoch = epoch_;
    iteration = in_flight_.front().iteration;
  }
  if (!cluster_.standing()) return false;
  cluster_.EndEpoch(epoch, absl::DeadlineExceededError(Str(
                               "iteration ", iteration, " of epoch ", epoch, " runs longer than ",
                               deadline_.count(), " ms: ", cluster_.WhoIsLate(iteration))));
  return true;
}

absl::Status CheckStages(const RemoteEngineOptions& options) {
  if (options.stages.empty()) return InvalidArgument("no workers");
  std::set<std::string> addresses;
  int64_t layer = 0;
  for (size_t stage = 0; stage < options.stages.size(); ++stage) {
    const RemoteEngineOptions::Place& place = options.stages[stage];
    if (!addresses.insert(place.address).second) {
      return InvalidArgument("worker ", place.address, " is named twice, for stage ", stage,
                             " too");
    }
    if (place.layers.begin != layer || place.layers.end <= layer) {
      return InvalidArgument("stage ", stage, " has layers ", place.layers.begin, " to ",
                             place.layers.end, ", expected them to begin at ", layer);
    }
    layer = place.layers.end;
  }
  if (layer != options.checkpoint->config().layers) {
    return InvalidArgument("the stages have ", layer, " layers, the model has ",
                           options.checkpoint->config().layers);
  }
  return absl::OkStatus();
}

absl::Status CheckDataPlane(const RemoteEngineOptions& options) {
  if (options.data_plane == DataPlane::kGloo) return absl::OkStatus();
  const std::string is = Str("the data plane between stages is ", Name(options.data_plane));
  if (options.backend != "cuda") {
    return InvalidArgument(is, ", but they compute on ", options.backend,
                           "; expected GPUs, or gloo");
  }
  if (options.wire != WireType::kF32) {
    return InvalidArgument(is, ", but the wire is ", Name(options.wire),
                           ", which only the host encodes; expected f32, or gloo");
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const RemoteEngineOptions& options) {
  TREADLE_RETURN_IF_ERROR(CheckStages(options));
  TREADLE_RETURN_IF_ERROR(CheckDataPlane(options));
  const struct {
    const char* name;
    int64_t value;
    int64_t least;
    int64_t most;
  } rows[] = {{"engine depth", options.depth, 0, 1 << 10},
              {"tensor-parallel degree", options.tensor_parallel, 1, 64},
              {"number of pages", options.kv_pages, 0, INT32_MAX},
              {"iteration deadline", options.iteration_deadline.count(), 1, INT32_MAX},
              {"silence", options.silence.count(), 1, INT32_MAX},
              {"connect deadline", options.connect_deadline.count(), 1, INT32_MAX}};
  for (const auto& [name, value, least, most] : rows) {
    if (value < least || value > most) {
      return InvalidArgument(name, " is ", value, ", expected ", least, " to ", most);
    }
  }
  return absl::OkStatus();
}

// Progress that stops being told when Create returns.
class CreationProgress {
 public:
  explicit CreationProgress(std::function<void(double)> tell) : tell_(std::move(tell)) {}
  void Tell(double fraction) {
    MutexLock lock(mutex_);
    if (tell_) tell_(fraction);
  }
  void Stop() {
    MutexLock lock(mutex_);
    tell_ = nullptr;
  }

 private:
  Mutex mutex_;
  std::function<void(double)> tell_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<RemoteEngine> RemoteEngine::Create(RemoteEngineOptions options) {
  TREADLE_CHECK(options.checkpoint != nullptr);
  MakeMessageThread();  // and all that gRPC and the server start from here on
  TREADLE_RETURN_IF_ERROR(CheckOptions(options));
  if (options.version.empty()) options.version = TREADLE_VERSION;
  TREADLE_ASSIGN_OR_RETURN(std::string fingerprint, Fingerprint(*options.checkpoint));
  const auto progress = std::make_shared<CreationProgress>(std::move(options.progress));
  options.progress = [progress](double fraction) { progress->Tell(fraction); };
  auto engine = std::make_unique<ClusterEngine>(options, std::move(fingerprint));
  WorkerCluster& cluster = engine->cluster();
  cluster.BeginEpoch(engine->epoch());
  const absl::Status standing = cluster.WaitUntilStanding();
  progress->Stop();
  TREADLE_RETURN_IF_ERROR(standing);
  RemoteEngine created;
  created.kv_pages = cluster.kv_pages();
  created.backend = cluster.backend();
  created.weight_bytes = cluster.weight_bytes();
  created.engine = std::move(engine);
  return created;
}

}  // namespace treadle
