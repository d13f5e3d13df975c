#include "server/cli/open_workers.h"

#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/placement.h"
#include "engine/remote/remote_engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/cli/control_tls.h"
#include "server/cli/load_ranks.h"
#include "server/cli/worker_supervisor.h"

namespace treadle {
namespace {

// A worker of this machine that was started again is there after a moment; one that is not by then
// has to be replaced.
constexpr std::chrono::seconds kLocalConnectDeadline{30};

// Costs are those of one rank: measured with as many threads as it will have.
absl::StatusOr<std::vector<PlacedStage>> Place(const Checkpoint& checkpoint,
                                               const ServeOptions& options, int64_t max_context) {
  const auto stages = static_cast<int>(options.stages());
  CpuBackendOptions cpu;
  cpu.threads = ThreadsOfRank(options, options.stages() * options.tensor_parallel);
  cpu.compute = options.compute;
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  CostOptions costs;
  costs.load = LoadOptionsFrom(options, max_context);
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
  supervisor.restart = options.on_worker_loss == OnWorkerLoss::kRestart;
  supervisor.log = log;
  for (int64_t stage = 0; stage < options.stages(); ++stage) {
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

RemoteEngineOptions EngineOptions(const ServeOptions& options, const RankDevices& devices,
                                  int64_t max_context) {
  RemoteEngineOptions engine;
  engine.backend = devices.cuda() ? "cuda" : "cpu";
  engine.dtype = options.dtype;
  engine.deterministic = options.deterministic;
  engine.tensor_parallel = static_cast<int>(options.tensor_parallel);
  engine.weights_from_master = options.weights_from == WeightsFrom::kMaster;
  engine.max_batch_tokens = options.max_batch_tokens;
  engine.max_context = max_context;
  engine.compute = options.compute;
  engine.weights = options.weights.text();
  engine.outlier_threshold = options.outlier_threshold;
  engine.outlier_rule = options.outlier_rule;
  engine.wire = options.wire;
  engine.data_plane = options.data_plane;
  engine.late_plans = options.plan_forwarding == PlanForwarding::kLate;
  engine.page_size = options.page_size;
  engine.kv_dtype = options.kv_dtype;
  if (options.kv_memory > 0) engine.kv_memory = options.kv_memory;
  engine.max_batch_size = options.max_batch_size;
  if (options.stages() == 1) engine.depth = static_cast<int>(options.engine_depth);
  engine.iteration_deadline = options.iteration_deadline;
  return engine;
}

std::string Describe(const std::vector<PlacedStage>& placed,
                     const std::vector<RemoteEngineOptions::Place>& places) {
  std::string text;
  for (size_t stage = 0; stage < placed.size(); ++stage) {
    const LayerRange& layers = placed[stage].layers;
    text += Str(stage == 0 ? "" : "; ", "stage ", stage, " at ", places[stage].address, ": layers ",
                layers.begin, "-", layers.end - 1);
  }
  return text;
}

}  // namespace

absl::StatusOr<OpenedWorkers> OpenWorkers(std::shared_ptr<const Checkpoint> checkpoint,
                                          const ServeOptions& options, const RankDevices& devices,
                                          int64_t max_context, LoadListeners listeners) {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<PlacedStage> placed,
                           Place(*checkpoint, options, max_context));
  RemoteEngineOptions engine = EngineOptions(options, devices, max_context);
  TREADLE_ASSIGN_OR_RETURN(engine.credentials, OpenControlTls(options.control_tls, listeners.log));
  std::vector<std::string> addresses = options.workers;
  if (addresses.empty()) {
    TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<WorkerSupervisor> workers,
                             StartWorkers(options, devices, listeners.log));
    addresses = workers->addresses();
    engine.connect_deadline = kLocalConnectDeadline;
    // One that dies is started again by its supervisor, and the next epoch finds it. One that hangs
    // stays where it is. Each waits for the others in an epoch, and which of them is to blame
    // cannot be told from outside.
    engine.replace_workers = [workers] { workers->KillAll(); };
  }
  for (size_t stage = 0; stage < placed.size(); ++stage) {
    const uint64_t bytes =
        placed[stage].weight_bytes * static_cast<uint64_t>(options.tensor_parallel);
    engine.stages.push_back(
        {.address = addresses[stage], .layers = placed[stage].layers, .weight_bytes = bytes});
  }
  OpenedWorkers opened;
  opened.placement = Describe(placed, engine.stages);
  engine.checkpoint = std::move(checkpoint);
  engine.progress = std::move(listeners.progress);
  TREADLE_ASSIGN_OR_RETURN(auto remote, RemoteEngine::Create(std::move(engine)));
  opened.kv_pages = remote->kv_pages();
  for (const uint64_t bytes : remote->weight_bytes()) opened.weight_bytes += bytes;
  opened.backend = Str(
      options.stages(), options.stages() == 1 ? " stage of " : " stages of ",
      options.tensor_parallel > 1 ? Str(options.tensor_parallel, " ranks of ") : "",
      remote->backend(),
      options.stages() > 1 ? Str(", wire ", Name(options.wire), " over ", Name(options.data_plane))
                           : "");
  opened.engine = std::move(remote);
  return opened;
}

}  // namespace treadle
