// Messages of the master to workers, and its checks of what they say.

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/status.h"
#include "engine/memory_plan.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/adapter_messages.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/worker_cluster.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

absl::StatusCode StatusCodeOf(int32_t code) {
  constexpr int kLastCode = static_cast<int>(absl::StatusCode::kUnauthenticated);
  const bool known = code > 0 && code <= kLastCode;
  return known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
}

// Failures that a lost neighbour may have caused.
bool MayBeOfAnother(absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable || code == absl::StatusCode::kAborted ||
         code == absl::StatusCode::kCancelled || code == absl::StatusCode::kDeadlineExceeded;
}

// Limits on what a worker says of itself: more than any machine has; few can be added or
// multiplied.
constexpr uint64_t kMaxMemory = uint64_t{1} << 50;
constexpr size_t kMaxNameBytes = 1 << 10;      // of a description, or a path
constexpr size_t kMaxMessageBytes = 64 << 10;  // of an error
constexpr size_t kMaxTraceEvents = 1 << 22;    // that nobody has taken

absl::Status CheckRange(const char* what, uint64_t found, uint64_t least, uint64_t most) {
  if (found >= least && found <= most) return absl::OkStatus();
  return InvalidArgument("it says ", found, " ", what, ", expected ", least, " to ", most);
}

bool OnGpus(const RemoteEngineOptions& options) { return options.backend == "cuda"; }

// Checks the settings that a worker was told to keep to.
absl::Status CheckNumerics(const RemoteEngineOptions& options, const control::WorkerHello& hello) {
  const bool gpus = OnGpus(options);
  const struct {
    const char* does;
    const std::string& kept_to;
    std::string_view wanted;
    bool counts;
  } rows[] = {
      {"runs on ", hello.device(), options.backend, true},
      {"computes ", hello.compute(), Name(options.compute), true},
      {"computes in ", hello.dtype(), Name(options.dtype), gpus},
      {"is deterministic: ", hello.deterministic(), options.deterministic ? "on" : "off", gpus}};
  for (const auto& [does, kept_to, wanted, counts] : rows) {
    if (!counts || kept_to.empty() || kept_to == wanted) continue;
    return absl::FailedPreconditionError(
        Str("the worker ", does, kept_to, ", this master wants ", wanted));
  }
  return absl::OkStatus();
}

absl::Status CheckMemory(const RemoteEngineOptions& options, uint64_t weight_bytes,
                         const control::WorkerHello& hello) {
  for (const uint64_t bytes : {hello.memory_available(), hello.held_bytes(), hello.gpu_memory()}) {
    TREADLE_RETURN_IF_ERROR(CheckRange("bytes of memory", bytes, 0, kMaxMemory));
  }
  uint64_t memory = hello.memory_available() + hello.held_bytes();
  if (OnGpus(options)) {
    if (hello.gpus() == 0) {
      return absl::FailedPreconditionError(Str("it has no GPU: ", hello.no_gpu()));
    }
    if (hello.gpus() < options.tensor_parallel) {
      return absl::FailedPreconditionError(
          Str("its ", options.tensor_parallel, " ranks need a GPU each, it has ", hello.gpus()));
    }
    memory = hello.gpu_memory() * static_cast<uint64_t>(options.tensor_parallel);
  }
  if (weight_bytes <= memory) return absl::OkStatus();
  return ResourceExhausted("its weights need ", weight_bytes >> 20, " MiB of memory, it has ",
                           memory >> 20, " MiB");
}

// Whether the worker can be that stage. FailedPrecondition: another version, device or arithmetic,
// or too few GPUs; ResourceExhausted: no memory for the weights.
absl::Status CheckHello(const RemoteEngineOptions& options, size_t stage,
                        const control::WorkerHello& hello) {
  const uint64_t weight_bytes = options.stages[stage].weight_bytes;
  const auto refuse = [](const auto&... parts) {
    return absl::FailedPreconditionError(Str(parts...));
  };
  if (hello.protocol() != kControlProtocol || hello.version() != options.version) {
    return refuse("the worker is version ", hello.version(), " (protocol ", hello.protocol(),
                  "), this is ", options.version, " (protocol ", kControlProtocol, ")");
  }
  TREADLE_RETURN_IF_ERROR(CheckNumerics(options, hello));
  TREADLE_RETURN_IF_ERROR(CheckMemory(options, weight_bytes, hello));
  if (!options.weights_from_master && hello.model_path().empty()) {
    return refuse("the worker has no model of its own: start it with --model, or send it the ",
                  "weights with --weights-from master");
  }
  return absl::OkStatus();
}

// All but the directory of tensors.
void DescribeStage(const RemoteEngineOptions& options, size_t stage, const ModelIdentity& identity,
                   control::Configure& out) {
  out.set_stage(static_cast<int32_t>(stage));
  out.set_stages(static_cast<int32_t>(options.stages.size()));
  out.set_tensor_parallel(options.tensor_parallel);
  out.set_first_layer(options.stages[stage].layers.begin);
  out.set_end_layer(options.stages[stage].layers.end);
  out.set_fingerprint(identity.fingerprint);
  for (const ModelIdentity::File& file : identity.files) {
    control::ModelFile& one = *out.add_files();
    one.set_name(std::filesystem::path(file.path).filename().string());
    one.set_sha256(file.sum);
  }
  out.set_backend(options.backend);
  if (OnGpus(options)) {
    out.set_dtype(std::string(Name(options.dtype)));
    out.set_deterministic(options.deterministic);
  }
  out.set_compute(std::string(Name(options.compute)));
  out.set_weights(options.weights);
  if (options.outlier_threshold) out.set_outlier_threshold(*options.outlier_threshold);
  out.set_outliers_per_call(options.outlier_rule == OutlierRule::kPerCall);
  out.set_kv_dtype(std::string(Name(options.kv_dtype)));
  out.set_wire(std::string(Name(options.wire)));
  out.set_data_plane(std::string(Name(options.data_plane)));
  out.set_max_batch_tokens(options.max_batch_tokens);
  out.set_max_context(options.max_context);
  out.set_page_size(options.page_size);
  out.set_replay_log_memory(options.replay_log_memory);
  out.set_iteration_deadline_ms(static_cast<uint32_t>(options.iteration_deadline.count()));
}

// Pages for the stage's cache, of `available` bytes if the options do not say how many. Errors:
// PlanKvMemory's.
absl::StatusOr<PageCounts> PagesOf(const RemoteEngineOptions& options, size_t stage,
                                   int64_t kv_heads, uint64_t available) {
  ModelConfig config = options.checkpoint->config();
  const int64_t context = options.max_context > 0 ? options.max_context : config.context;
  config.kv_heads = kv_heads;
  TREADLE_ASSIGN_OR_RETURN(const KvMemoryPlan plan,
                           PlanKvMemory(config, {.kv_bytes = options.kv_memory,
                                                 .available_bytes = static_cast<int64_t>(available),
                                                 .available_share = OnGpus(options) ? 0.9 : 0.5,
                                                 .max_batch_size = options.max_batch_size,
                                                 .max_batch_tokens = options.max_batch_tokens,
                                                 .max_context = context,
                                                 .page_size = options.page_size,
                                                 .kv_dtype = options.kv_dtype,
                                                 .tensor_parallel = options.tensor_parallel,
                                                 .layers = options.stages[stage].layers}));
  return plan.pages;
}

}  // namespace

void WorkerCluster::OnMessage(size_t stage, uint64_t attempt, control::WorkerMessage& message) {
  double progress = -1;
  {
    MutexLock lock(mutex_);
    Peer& peer = peers_[stage];
    if (peer.attempt != attempt || peer.state == State::kDown) return;
    peer.heard = SteadyClock::now();
    if (!message.has_heartbeat() || message.heartbeat().busy()) peer.busy = peer.heard;
    peer.reached = true;
    if (!message.has_result() && !message.has_tensor()) {
      Dispatch(stage, message);
      Advance();
    }
    if (message.has_progress()) progress = MeanProgress();
  }
  if (message.has_result() && stage + 1 == options_.stages.size()) {
    callbacks_.result(message.result());
  }
  if (message.has_tensor() && options_.weights_from_master) Answer(stage, message);
  if (progress >= 0 && options_.progress) options_.progress(progress);
  TellNews();
}

void WorkerCluster::Dispatch(size_t stage, control::WorkerMessage& message) {
  Peer& peer = peers_[stage];
  absl::Status status;
  switch (message.kind_case()) {
    case control::WorkerMessage::kHello:
      status = OnHello(stage, message.hello());
      break;
    case control::WorkerMessage::kProgress:
      if (const double done = message.progress(); done >= 0 && done <= 1) peer.progress = done;
      break;
    case control::WorkerMessage::kLoaded:
      status = OnLoaded(stage, message.loaded());
      break;
    case control::WorkerMessage::kReserved:
      status = OnReserved(stage, message.reserved().memory());
      break;
    case control::WorkerMessage::kAdapterLoaded:
      status = OnAdapter(stage, message.adapter_loaded());
      break;
    case control::WorkerMessage::kEpochReady:
      if (message.epoch_ready() == epoch_ && peer.state == State::kForming) {
        peer.state = State::kReady;
      }
      break;
    case control::WorkerMessage::kFailed:
      OnFailed(stage, message.failed());
      break;
    case control::WorkerMessage::kRendezvous:
      Relay(stage, message.rendezvous());
      break;
    case control::WorkerMessage::kHeartbeat:
      if (message.heartbeat().epoch() != epoch_) break;
      peer.received = message.heartbeat().plans_received();
      peer.done = message.heartbeat().plans_done();
      break;
    case control::WorkerMessage::kTrace:
      status = OnTrace(stage, message.trace());
      break;
    default:
      break;
  }
  if (!status.ok()) Lose(stage, status);
}

absl::Status WorkerCluster::OnHello(size_t stage, const control::WorkerHello& hello) {
  Peer& peer = peers_[stage];
  if (peer.state != State::kGreeting) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(CheckHello(options_, stage, hello));
  peer.memory_pool = hello.machine();
  peer.progress = 0;
  peer.state = State::kLoading;
  if (tracing_) {
    peer.stream->Tell([](auto& message) { message.set_tracing(true); });
  }
  peer.stream->Tell([&](auto& message) {
    DescribeStage(options_, stage, identity_, *message.mutable_configure());
    if (!options_.weights_from_master) return;
    peer.sender =
        std::make_shared<CheckpointSender>(*options_.checkpoint, options_.tensor_parallel);
    peer.sender->Describe(*message.mutable_configure()->mutable_directory());
  });
  return absl::OkStatus();
}

absl::Status WorkerCluster::OnLoaded(size_t stage, const control::Loaded& loaded) {
  Peer& peer = peers_[stage];
  if (peer.state != State::kLoading) return absl::OkStatus();
  if (loaded.fingerprint() != identity_.fingerprint) {
    return absl::FailedPreconditionError(Str("it has loaded another model: SHA-256 ",
                                             loaded.fingerprint().substr(0, 16), "..., expected ",
                                             identity_.fingerprint.substr(0, 16), "..."));
  }
  // Where there are more ranks than K/V heads, several hold the same one.
  const auto kv_heads = static_cast<uint64_t>(
      std::max<int64_t>(options_.checkpoint->config().kv_heads, options_.tensor_parallel));
  TREADLE_RETURN_IF_ERROR(CheckRange("K/V heads", loaded.kv_heads(), 1, kv_heads));
  const PageCounts kv_pages = DecodePages(loaded.kv_pages());
  for (const PageKind kind : kPageKinds) {
    TREADLE_RETURN_IF_ERROR(CheckRange("K/V pages", kv_pages[kind], 0, INT32_MAX));
  }
  TREADLE_RETURN_IF_ERROR(CheckRange("bytes of weights", loaded.weight_bytes(), 0, kMaxMemory));
  TREADLE_RETURN_IF_ERROR(CheckRange("bytes of memory", loaded.memory_available(), 0, kMaxMemory));
  TREADLE_RETURN_IF_ERROR(
      CheckRange("bytes of description", loaded.backend().size(), 0, kMaxNameBytes));
  peer.state = State::kLoaded;
  peer.progress = 1;
  peer.weight_bytes = loaded.weight_bytes();
  peer.memory_available = loaded.memory_available();
  if (!loaded.memory_pool().empty()) peer.memory_pool = loaded.memory_pool();
  peer.kv_heads = loaded.kv_heads();
  peer.kv_pages = kv_pages;
  peer.backend = loaded.backend();
  return absl::OkStatus();
}

absl::Status WorkerCluster::OnTrace(size_t stage, const control::Trace& trace) {
  for (const control::TraceEvent& event : trace.event()) {
    if (event.kind() >= std::size(TraceEvent::kNames)) {
      return InvalidArgument("trace: kind is ", event.kind());
    }
    if (event.rank() < 0 || event.rank() >= options_.tensor_parallel) {
      return InvalidArgument("trace: rank is ", event.rank(), ", expected 0 to ",
                             options_.tensor_parallel - 1);
    }
    if (trace_.size() == kMaxTraceEvents) return absl::OkStatus();
    trace_.push_back({.epoch = event.epoch(),
                      .iteration = event.iteration(),
                      .stage = static_cast<int32_t>(stage),
                      .rank = event.rank(),
                      .kind = static_cast<TraceEvent::Kind>(event.kind()),
                      .begin = event.begin(),
                      .end = event.end()});
  }
  return absl::OkStatus();
}

absl::Status WorkerCluster::OnReserved(size_t stage, uint64_t memory) {
  Peer& peer = peers_[stage];
  if (peer.state != State::kReserving) return absl::OkStatus();
  peer.state = State::kIdle;
  peer.memory = memory;
  for (const auto& [id, adapter] : adapters_) {
    control::MasterMessage message;
    TREADLE_RETURN_IF_ERROR(
        EncodeAdapter(*adapter, options_.stages[stage].layers, *message.mutable_load_adapter()));
    peer.stream->Send(std::move(message));
    peer.adapters.insert(id);
  }
  return absl::OkStatus();
}

// A refusal goes to who is loading it. Otherwise the stage cannot run what it is to run.
absl::Status WorkerCluster::OnAdapter(size_t stage, const control::AdapterLoaded& loaded) {
  if (peers_[stage].adapters.erase(loaded.id()) == 0) return absl::OkStatus();
  changed_.NotifyAll();
  if (loaded.code() == 0) return absl::OkStatus();
  const absl::Status status(StatusCodeOf(loaded.code()),
                            loaded.message().substr(0, kMaxMessageBytes));
  const auto waited = refused_.find(loaded.id());
  if (waited == refused_.end()) return status;
  waited->second = Named(stage, status);
  return absl::OkStatus();
}

void WorkerCluster::OnFailed(size_t stage, const control::Failed& failed) {
  const absl::StatusCode code = StatusCodeOf(failed.code());
  const absl::Status status(code, failed.message().substr(0, kMaxMessageBytes));
  if (failed.epoch() == 0) return Lose(stage, status);
  if (failed.epoch() != epoch_ || !wanted_ || !begun_) return;
  if (code == absl::StatusCode::kDataLoss) peers_[stage].lost = lost_some_ = true;
  if (!MayBeOfAnother(code)) return End(Named(stage, status));
  if (!suspicion_.ok()) return;
  suspicion_ = Named(stage, status);
  suspicion_due_ = SteadyClock::now() + options_.suspicion;
  pulse_->Nudge();
}

void WorkerCluster::Relay(size_t stage, const control::Rendezvous& message) {
  if (message.epoch() != epoch_ || !begun_) return;
  for (size_t other = 0; other < peers_.size(); ++other) {
    if (other == stage || peers_[other].state < State::kForming) continue;
    peers_[other].stream->Tell([&](auto& relayed) { *relayed.mutable_rendezvous() = message; });
  }
}

void WorkerCluster::Answer(size_t stage, control::WorkerMessage& message) {
  std::shared_ptr<CheckpointSender> sender;
  {
    MutexLock lock(mutex_);
    sender = peers_[stage].sender;
  }
  if (!sender) return;  // it has not been told what there is
  control::MasterMessage answer;
  sender->Answer(message.tensor(), *answer.mutable_tensor());
  MutexLock lock(mutex_);
  if (peers_[stage].state != State::kDown) peers_[stage].stream->Send(std::move(answer));
}

double WorkerCluster::MeanProgress() const {
  double sum = 0;
  for (const Peer& peer : peers_) sum += peer.progress;
  return sum / static_cast<double>(peers_.size());
}

// The pages of the tightest stage.
absl::Status WorkerCluster::PlanPages() {
  PageCounts tightest(INT32_MAX, INT32_MAX);
  const auto limit = [&tightest](const PageCounts& pages) {
    for (const PageKind kind : kPageKinds) tightest[kind] = std::min(tightest[kind], pages[kind]);
  };
  for (size_t stage = 0; stage < peers_.size(); ++stage) {
    const Peer& peer = peers_[stage];
    if (peer.kv_pages != PageCounts() && !options_.kv_memory) {
      limit(peer.kv_pages);
      continue;
    }
    const auto sharing = std::ranges::count(peers_, peer.memory_pool, &Peer::memory_pool);
    // A worker that has a cache already drops it before it makes another: only it knows then how
    // much memory there is, and it refuses what it cannot have.
    const bool has_cache = peer.kv_pages != PageCounts();
    const auto pages =
        PagesOf(options_, stage, peer.kv_heads,
                has_cache ? 0 : peer.memory_available / static_cast<uint64_t>(sharing));
    if (!pages.ok()) return Named(stage, pages.status());
    limit(*pages);
  }
  kv_pages_ = tightest;
  return absl::OkStatus();
}

}  // namespace treadle
