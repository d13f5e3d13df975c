// The engine of a model: ranks of this process, or worker processes.
#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/kv/kv_cache.h"
#include "engine/local_engine.h"
#include "engine/placement.h"
#include "engine/remote/remote_engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cli/daemon.h"
#include "server/cli/open_model.h"
#include "server/cli/workers/worker_supervisor.h"
#include "server/flag_values.h"

namespace treadle {
namespace {

// A worker of this machine that was started again is there after a moment; one that is not by then
// has to be replaced.
constexpr std::chrono::seconds kLocalConnectDeadline{10};

// Costs are those of one rank: measured with as many threads as it will have.
absl::StatusOr<std::vector<PlacedStage>> Place(const Checkpoint& checkpoint,
                                               const ServeOptions& options) {
  const auto stages = static_cast<int>(options.stages());
  CpuBackendOptions cpu;
  cpu.threads = ThreadsOfRank(options, options.stages() * options.tensor_parallel);
  cpu.compute = options.compute;
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  CostOptions costs;
  costs.load = LoadOptionsFrom(options, options.max_context);
  costs.load.threads = cpu.threads;
  costs.kv_dtype = options.kv_dtype;
  costs.prompt_tokens = options.placement_prompt_tokens;
  TREADLE_ASSIGN_OR_RETURN(const PlacementCosts measured,
                           MeasureCosts(checkpoint, *backend, costs));
  return PlaceLayers(measured, stages, {.page_size = options.page_size});
}

absl::StatusOr<std::unique_ptr<WorkerSupervisor>> StartWorkers(const ServeOptions& options,
                                                               const RankDevices& devices,
                                                               const LogSink& log) {
  const int64_t ranks = options.stages() * options.tensor_parallel;
  const int threads = ThreadsOfRank(options, ranks);
  WorkerSupervisor::Options supervisor;
  supervisor.restart = options.on_worker_loss != OnWorkerLoss::kFail;
  supervisor.keep_memory = options.on_worker_loss == OnWorkerLoss::kRecover;
  supervisor.log = log;
  if (options.spares > 0 && devices.cuda()) {
    return InvalidArgument("--spares is ", options.spares,
                           ", but workers of this machine have GPUs of their own; expected "
                           "--workers, --device cpu, or 0");
  }
  for (int64_t worker = 0; worker < options.stages() + options.spares; ++worker) {
    const int64_t stage = worker % options.stages();
    std::vector<std::string>& arguments = supervisor.arguments.emplace_back();
    arguments = {"--threads",     Str(threads),
                 "--pin-threads", options.pin_threads ? "on" : "off",
                 "--first-cpu",   Str(stage * options.tensor_parallel * threads)};
    // For the supervisor; format and level of what comes out are the log's.
    arguments.insert(arguments.end(), {"--log-format", "json"});
    for (std::string& flag : devices.WorkerFlags(stage)) arguments.push_back(std::move(flag));
    if (options.weights_from == WeightsFrom::kFile) {
      arguments.insert(arguments.end(), {"--model", options.model});
    }
  }
  return WorkerSupervisor::Start(std::move(supervisor));
}

RemoteEngineOptions EngineOptions(const ServeOptions& options, const RankDevices& devices) {
  RemoteEngineOptions engine;
  engine.backend = devices.cuda() ? "cuda" : "cpu";
  engine.dtype = options.dtype;
  engine.deterministic = options.deterministic;
  engine.tensor_parallel = static_cast<int>(options.tensor_parallel);
  engine.weights_from_master = options.weights_from == WeightsFrom::kMaster;
  engine.max_batch_tokens = options.max_batch_tokens;
  engine.max_context = options.max_context;
  engine.compute = options.compute;
  engine.weights = options.weights.text();
  engine.outlier_threshold = options.outlier_threshold;
  engine.outlier_rule = options.outlier_rule;
  engine.wire = options.wire;
  engine.data_plane = options.data_plane;
  engine.replay_log_memory = options.replay_log_memory;
  engine.late_plans = options.plan_forwarding == PlanForwarding::kLate;
  engine.page_size = options.page_size;
  engine.kv_dtype = options.kv_dtype;
  if (options.kv_memory > 0) engine.kv_memory = options.kv_memory;
  engine.max_batch_size = options.max_batch_size;
  if (options.stages() == 1) engine.depth = static_cast<int>(options.engine_depth);
  engine.iteration_deadline = options.iteration_deadline;
  return engine;
}

// An engine in worker processes, which owns those that were started for it: placement, workers of
// this machine where none are given, attachment and loading. Errors say which flag, layer or
// worker. `log`: what workers of this machine say.
absl::Status UseWorkers(const CheckedModel& checked, std::function<void(double)> progress,
                        const LogSink& log, OpenedModel& opened) {
  const auto& [checkpoint, draft, devices, options, sampling] = checked;
  TREADLE_ASSIGN_OR_RETURN(const std::vector<PlacedStage> placed, Place(*checkpoint, options));
  RemoteEngineOptions engine = EngineOptions(options, devices);
  TREADLE_ASSIGN_OR_RETURN(
      engine.credentials,
      OpenControlCredentials(options.control_tls, options.control_secret_file, log));
  std::vector<std::string> addresses = options.workers;
  if (addresses.empty()) {
    TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<WorkerSupervisor> workers,
                             StartWorkers(options, devices, log));
    addresses = workers->addresses();
    engine.connect_deadline = kLocalConnectDeadline;
    // One that dies is started again by its supervisor, and the next epoch finds it. One that hangs
    // stays where it is. Each waits for the others in an epoch, and which of them is to blame
    // cannot be told from outside.
    engine.replace_worker = [workers](const std::string& address, const std::string& why) {
      workers->Kill(address, why);
    };
  }
  for (size_t stage = 0; stage < placed.size(); ++stage) {
    const LayerRange& layers = placed[stage].layers;
    const uint64_t bytes =
        placed[stage].weight_bytes * static_cast<uint64_t>(options.tensor_parallel);
    engine.stages.push_back({.address = addresses[stage], .layers = layers, .weight_bytes = bytes});
    opened.setup.end_layers.push_back(layers.end);
    opened.AddNotice(Str("stage ", stage, " at ", addresses[stage], ": layers ", layers.begin, "-",
                         layers.end - 1));
  }
  engine.spares.assign(addresses.begin() + options.stages(), addresses.end());
  engine.checkpoint = checkpoint;
  engine.progress = std::move(progress);
  TREADLE_ASSIGN_OR_RETURN(auto remote, RemoteEngine::Create(std::move(engine)));
  opened.kv = KvMemoryOf(checkpoint->config(), KvMemoryFrom(options), remote->kv_pages());
  for (const uint64_t bytes : remote->weight_bytes()) opened.weight_bytes += bytes;
  opened.rank_backend = remote->backend();
  opened.served.backend = Str(
      options.stages(), options.stages() == 1 ? " stage of " : " stages of ",
      options.tensor_parallel > 1 ? Str(options.tensor_parallel, " ranks of ") : "",
      remote->backend(),
      options.stages() > 1 ? Str(", wire ", Name(options.wire), " over ", Name(options.data_plane))
                           : "");
  opened.engine = std::move(remote);
  return absl::OkStatus();
}

// An engine of this process.
absl::Status UseRanks(const CheckedModel& checked, std::function<void(double)> progress,
                      OpenedModel& opened) {
  const auto& [checkpoint, draft, devices, options, sampling] = checked;
  TREADLE_ASSIGN_OR_RETURN(
      std::vector<StageRanks::Rank> ranks,
      LoadRanks(*checkpoint, options, devices, options.max_context, std::move(progress)));
  opened.served.backend = opened.rank_backend = ranks[0].backend->description();
  if (ranks.size() > 1) {
    opened.served.backend = Str(ranks.size(), " ranks of ", opened.served.backend);
  }
  for (const StageRanks::Rank& rank : ranks) opened.weight_bytes += rank.model->weight_bytes();

  KvMemoryRequest memory = KvMemoryFrom(options);
  if (options.kv_memory > 0) memory.kv_bytes = options.kv_memory;
  memory.available_bytes = devices.AvailableBytes();
  memory.available_share = devices.CacheShare();
  memory.max_batch_size = options.max_batch_size;
  TREADLE_ASSIGN_OR_RETURN(opened.kv, PlanKvMemory(checkpoint->config(), memory));

  LocalEngineOptions engine = LocalEngineFrom(options, opened.kv.pages);
  engine.join = devices.Joiner();
  TREADLE_ASSIGN_OR_RETURN(opened.engine, LocalEngine::Create(std::move(ranks), engine));
  opened.setup.end_layers = {checkpoint->config().layers};
  return absl::OkStatus();
}

}  // namespace

absl::Status OpenEngine(const CheckedModel& checked, std::function<void(double)> progress,
                        const LogSink& log, OpenedModel& opened) {
  const ServeOptions& options = checked.options;
  absl::Status status = options.remote() ? UseWorkers(checked, std::move(progress), log, opened)
                                         : UseRanks(checked, std::move(progress), opened);
  if (status.message().find(kNoKvMemory) == std::string_view::npos) return status;
  return {status.code(),
          Str(status.message(), "; --kv-memory is ",
              options.kv_memory == 0
                  ? std::string("auto, expected a smaller size, written like 512M or 2G")
                  : Str(ShowBytes(options.kv_memory), ", expected a smaller one"))};
}

}  // namespace treadle
