#include "engine/remote/remote_engine.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "base/version.h"
#include "engine/plan/plan.pb.h"
#include "engine/plan/plan_messages.h"
#include "engine/plan/result_check.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/thread_priority.h"
#include "engine/remote/worker_cluster.h"
#include "models/checkpoints/fingerprint.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

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
  for (const std::string& spare : options.spares) {
    if (addresses.insert(spare).second) continue;
    return InvalidArgument("worker ", spare, " is named twice, as a spare, too");
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
              {"number of pages", options.kv_pages[PageKind::kWhole], 0, INT32_MAX},
              {"number of window pages", options.kv_pages[PageKind::kWindow], 0, INT32_MAX},
              {"iteration deadline", options.iteration_deadline.count(), 1, INT32_MAX},
              {"silence", options.silence.count(), 1, INT32_MAX},
              {"connect deadline", options.connect_deadline.count(), 1, INT32_MAX},
              {"replay log's memory", options.replay_log_memory, 0, INT64_MAX},
              {"join deadline", options.join_deadline.count(), 1, INT32_MAX}};
  for (const auto& [name, value, least, most] : rows) {
    if (value < least || value > most) {
      return InvalidArgument(name, " is ", value, ", expected ", least, " to ", most);
    }
  }
  return absl::OkStatus();
}

// Progress that stops being told when Create returns.
struct CreationProgress {
  Mutex mutex;
  std::function<void(double)> tell ABSL_GUARDED_BY(mutex);
};

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteEngine>> RemoteEngine::Create(RemoteEngineOptions options) {
  TREADLE_CHECK(options.checkpoint != nullptr);
  MakeMessageThread();  // and all that gRPC and the server start from here on
  TREADLE_RETURN_IF_ERROR(CheckOptions(options));
  if (options.version.empty()) options.version = kVersion;
  TREADLE_ASSIGN_OR_RETURN(ModelIdentity identity, IdentityOf(*options.checkpoint));
  const std::shared_ptr<CreationProgress> progress(
      new CreationProgress{{}, std::move(options.progress)});
  options.progress = [progress](double fraction) {
    MutexLock lock(progress->mutex);
    if (progress->tell) progress->tell(fraction);
  };
  std::unique_ptr<RemoteEngine> engine(new RemoteEngine(options, std::move(identity)));
  engine->cluster_->BeginEpoch(engine->epoch());
  const absl::Status standing = engine->cluster_->WaitUntilStanding();
  {
    MutexLock lock(progress->mutex);
    progress->tell = nullptr;
  }
  TREADLE_RETURN_IF_ERROR(standing);
  return engine;
}

RemoteEngine::RemoteEngine(const RemoteEngineOptions& options, ModelIdentity identity)
    : stages_(static_cast<int>(options.stages.size())),
      depth_(options.depth > 0 ? options.depth : std::max(stages_, 2)),
      vocab_(options.checkpoint->config().vocab),
      hidden_(options.checkpoint->config().hidden),
      through_hosts_(options.data_plane == DataPlane::kGloo),
      replay_log_memory_(options.replay_log_memory),
      replay_log_{.wire = options.wire, .hidden = hidden_, .page_size = options.page_size},
      limit_(options.iteration_deadline),
      cluster_(std::make_unique<WorkerCluster>(
          options, std::move(identity),
          WorkerCluster::Callbacks{
              .result = [this](const proto::Result& result) { OnResult(result); },
              .news = [this] { Wake(); },
              .beat = [this] { EnforceDeadline(); }})) {}

RemoteEngine::~RemoteEngine() = default;

PageCounts RemoteEngine::kv_pages() const { return cluster_->kv_pages(); }
std::string RemoteEngine::backend() const { return cluster_->backend(); }
std::vector<uint64_t> RemoteEngine::weight_bytes() const { return cluster_->weight_bytes(); }
absl::Status RemoteEngine::status() const { return cluster_->status(); }
void RemoteEngine::SetTracing(bool on) { cluster_->SetTracing(on); }
std::vector<TraceEvent> RemoteEngine::TakeTrace() { return cluster_->TakeTrace(); }

absl::Status RemoteEngine::Start(std::function<void()> wake) {
  MutexLock lock(wake_mutex_);
  TREADLE_CHECK(!wake_);
  wake_ = std::move(wake);
  return absl::OkStatus();
}

void RemoteEngine::Wake() {
  MutexLock lock(wake_mutex_);
  if (wake_) wake_();
}

bool RemoteEngine::HasRoom() const {
  {
    MutexLock lock(wake_mutex_);
    if (!wake_) return false;
  }
  if (!cluster_->standing()) return false;
  MutexLock lock(mutex_);
  return static_cast<int>(in_flight_.size() + results_.size()) < depth_;
}

void RemoteEngine::Restart() {
  uint64_t epoch = 0;
  {
    MutexLock lock(mutex_);
    epoch = ++epoch_;
    next_iteration_ = 0;
    in_flight_.clear();
    results_.clear();
  }
  cluster_->BeginEpoch(epoch);
}

StageRange RemoteEngine::TakeLost() {
  const StageRange lost = cluster_->TakeLost();
  const bool all = lost.begin == 0 && lost.end == stages_;
  return all || !through_hosts_ ? StageRange() : lost;
}

int64_t RemoteEngine::replay_pages() const {
  ReplayLog::Options log = replay_log_;
  log.pages = kv_pages()[PageKind::kWhole];
  return through_hosts_ ? ReplayLog::PagesIn(replay_log_memory_, log) : 0;
}

void RemoteEngine::Submit(IterationPlan plan) {
  if (!cluster_->status().ok()) return;  // the epoch ended between HasRoom and here
  TREADLE_CHECK(cluster_->standing() || !cluster_->status().ok());
  proto::Plan message;
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
      for (Step& step : plan.steps) step.tokens.clear();
      in_flight_.push_back({next_iteration_++, plan.num_tokens(), std::move(plan.steps)});
    }
  }
  if (!wrong.ok()) return cluster_->EndEpoch(epoch, std::move(wrong));
  cluster_->SendPlan(std::move(message));
}

void RemoteEngine::SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) {
  if (epoch != this->epoch() || masks.empty()) return;
  proto::Masks message;
  EncodeMasks(epoch, iteration, masks, message);
  cluster_->SendMasks(std::move(message));
}

absl::Status RemoteEngine::LoadAdapter(std::shared_ptr<const AdapterFile> adapter) {
  return cluster_->LoadAdapter(adapter);
}

void RemoteEngine::UnloadAdapter(uint64_t id) { cluster_->UnloadAdapter(id); }

std::vector<IterationResult> RemoteEngine::TakeResults() {
  EnforceDeadline();
  if (!cluster_->status().ok()) return {};
  MutexLock lock(mutex_);
  return std::exchange(results_, {});
}

// On a thread of gRPC's.
void RemoteEngine::OnResult(const proto::Result& message) {
  absl::StatusOr<IterationResult> result = DecodeResult(message);
  uint64_t epoch = 0;
  absl::Status wrong = result.status();
  {
    MutexLock lock(mutex_);
    if (message.epoch() != epoch_) return;  // of an old one
    epoch = epoch_;
    if (result.ok() && in_flight_.empty()) {
      wrong = InvalidArgument("it is of iteration ", result->iteration, ", and no plan runs");
    } else if (result.ok() && in_flight_.front().iteration != result->iteration) {
      wrong = InvalidArgument("it is of iteration ", result->iteration, ", expected ",
                              in_flight_.front().iteration);
    } else if (result.ok()) {
      wrong = CheckResult(*result, in_flight_.front().steps, vocab_, hidden_);
    }
    if (wrong.ok()) {
      const auto now = SteadyClock::now();
      limit_.Note(now - first_since_, in_flight_.front().tokens);
      in_flight_.pop_front();
      first_since_ = now;
      results_.push_back(*std::move(result));
    }
  }
  if (!wrong.ok()) {
    cluster_->EndEpoch(epoch, absl::DataLossError(Str("a result of stage ", stages_ - 1, ": ",
                                                      std::string(wrong.message()))));
  }
  Wake();
}

// Ends the epoch if its first plan in flight is late. The cluster calls it while it is being made:
// without a plan in flight it must not be touched.
void RemoteEngine::EnforceDeadline() {
  uint64_t epoch = 0;
  uint64_t iteration = 0;
  IterationLimit::Duration limit;
  {
    MutexLock lock(mutex_);
    if (in_flight_.empty() || SteadyClock::now() - first_since_ <= limit_.Least()) return;
  }
  const auto slack = cluster_->slack();
  {
    MutexLock lock(mutex_);
    if (in_flight_.empty()) return;
    const auto waited = SteadyClock::now() - first_since_;
    int64_t tokens = 0;
    for (const InFlight& plan : in_flight_) tokens += plan.tokens;
    limit = limit_.For(tokens) + slack;
    if (waited <= limit) return;
    epoch = epoch_;
    iteration = in_flight_.front().iteration;
  }
  if (!cluster_->standing()) return;
  {
    MutexLock lock(mutex_);
    limit_.Forget();
  }
  cluster_->EndEpoch(
      epoch, absl::DeadlineExceededError(Str(
                 "iteration ", iteration, " of epoch ", epoch, " runs longer than ",
                 limit / std::chrono::milliseconds(1), " ms: ", cluster_->WhoIsLate(iteration))));
}

}  // namespace treadle
