#include "engine/remote/worker/worker_stage.h"

#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/memory.h"
#include "base/quoted.h"
#include "base/status.h"
#include "engine/choices.h"
#include "engine/memory_plan.h"
#include "engine/plan/plan_messages.h"
#include "engine/remote/control.pb.h"
#include "engine/remote/thread_priority.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "models/checkpoints/fingerprint.h"
#include "models/model.h"

namespace treadle {
namespace {

constexpr std::string_view kCpu = "cpu";
constexpr std::string_view kCuda = "cuda";

// Limits of what serve's own flags allow a master to ask for.
constexpr int64_t kMaxRanks = 64;
constexpr int64_t kMaxBatchTokens = 1 << 20;
constexpr int64_t kMaxPageSize = 1 << 20;

// One of the types that a K/V cache, or a GPU's products, can have.
DType DTypeFrom(std::string_view name) {
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kI8}) {
    if (Name(dtype) == name) return dtype;
  }
  return DType::kF16;
}

// Runs `work` on a thread whose low priority goes over to all threads that it starts.
absl::Status RunAtLowPriority(const std::function<absl::Status()>& work) {
  absl::Status status;
  try {
    std::thread([&] {
      MakeComputeThread();
      status = work();
    }).join();
  } catch (const std::system_error& error) {
    return ResourceExhausted("loading thread: ", error.what());
  }
  return status;
}

absl::StatusOr<LoadOptions> LoadOptionsFrom(const control::Configure& configuration) {
  LoadOptions load;
  load.layers = {configuration.first_layer(), configuration.end_layer()};
  load.shard.size = configuration.tensor_parallel();
  load.max_batch_tokens = configuration.max_batch_tokens();
  load.max_context = configuration.max_context();
  if (!configuration.weights().empty()) {
    TREADLE_ASSIGN_OR_RETURN(load.weights, WeightPlan::Parse(configuration.weights()));
  }
  if (configuration.has_outlier_threshold()) {
    load.outlier_threshold = configuration.outlier_threshold();
  }
  load.outlier_rule =
      configuration.outliers_per_call() ? OutlierRule::kPerCall : OutlierRule::kPerRow;
  return load;
}

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(const control::Configure& configuration,
                                                       const RankOptions& options, int rank,
                                                       int threads) {
  if (configuration.backend() == kCuda) {
    return options.gpus.create(rank, DTypeFrom(configuration.dtype()),
                               configuration.deterministic(), threads);
  }
  return CreateCpuBackend(
      {.threads = threads,
       .pin = options.pin,
       .first_cpu = options.first_cpu + rank * threads,
       .compute = ValueOf(kComputeModes, configuration.compute()).value_or(ComputeMode::kAuto)});
}

absl::Status CheckDataPlane(const control::Configure& configuration, const RankGpus& gpus) {
  const std::string& wanted = configuration.data_plane();
  const std::optional<DataPlane> plane = ValueOf(kDataPlanes, wanted);
  if (!plane) {
    return Unimplemented("the master wants activations over ", Quoted(wanted),
                         ", this worker has: gloo, nccl");
  }
  if (*plane == DataPlane::kGloo) return absl::OkStatus();
  const auto refuse = [&](const auto&... parts) {
    return absl::FailedPreconditionError(
        Str("the master wants activations over ", wanted, ", but ", parts...));
  };
  if (configuration.backend() != kCuda) {
    return refuse("this worker is to compute on ", configuration.backend());
  }
  if (configuration.wire() != Name(WireType::kF32)) {
    return refuse("with the wire ", configuration.wire(), ", which only the host encodes");
  }
  if (const absl::Status can = gpus.can_link(); !can.ok()) {
    return refuse("this worker cannot: ", std::string(can.message()));
  }
  return absl::OkStatus();
}

// There is a next stage, and what it gets goes through this host.
bool KeepsLog(const control::Configure& configuration) {
  return configuration.stage() + 1 < configuration.stages() &&
         configuration.data_plane() == Name(DataPlane::kGloo);
}

// Words that are chosen from a few. InvalidArgument names the field.
absl::Status CheckNames(const control::Configure& configuration) {
  const auto one_of = [](const char* field, const std::string& word,
                         std::initializer_list<std::string_view> known) -> absl::Status {
    if (std::ranges::find(known, word) != known.end()) return absl::OkStatus();
    std::string expected;
    for (const std::string_view one : known) expected += Str(expected.empty() ? "" : ", ", one);
    return InvalidArgument("the master wants ", field, " ", Quoted(word), ", expected one of ",
                           expected);
  };
  const std::string_view bf16 = Name(DType::kBF16), f16 = Name(DType::kF16),
                         f32 = Name(DType::kF32), int8 = Name(DType::kI8);
  TREADLE_RETURN_IF_ERROR(
      one_of("a K/V cache of", configuration.kv_dtype(), {f16, f32, bf16, int8}));
  if (!ValueOf(kComputeModes, configuration.compute())) {
    return InvalidArgument("the master wants the arithmetic ", Quoted(configuration.compute()),
                           ", expected one of ", WordsOf(kComputeModes));
  }
  if (configuration.backend() == kCuda) {
    TREADLE_RETURN_IF_ERROR(one_of("products in", configuration.dtype(), {bf16, f16, f32}));
  }
  if (!ValueOf(kWireTypes, configuration.wire())) {
    return InvalidArgument("the master wants the wire ", Quoted(configuration.wire()),
                           ", which this worker does not know");
  }
  return absl::OkStatus();
}

// Refuses what would otherwise be a bug in the model's loader.
absl::Status Check(const control::Configure& configuration, const Checkpoint& checkpoint,
                   const RankGpus& gpus) {
  const ModelConfig& config = checkpoint.config();
  if (configuration.first_layer() < 0 || configuration.first_layer() >= configuration.end_layer() ||
      configuration.end_layer() > config.layers) {
    return InvalidArgument("layers ", configuration.first_layer(), " to ",
                           configuration.end_layer(), " of ", config.layers);
  }
  const struct {
    const char* name;
    int64_t value;
    int64_t least;
    int64_t most;
  } rows[] = {
      {"number of stages", configuration.stages(), 1, config.layers},
      {"stage", configuration.stage(), 0, int64_t{configuration.stages()} - 1},
      {"tensor-parallel degree", configuration.tensor_parallel(), 1, kMaxRanks},
      {"max_batch_tokens", configuration.max_batch_tokens(), 1, kMaxBatchTokens},
      {"max_context", configuration.max_context(), 0, config.context},
      {"page size", configuration.page_size(), 16, kMaxPageSize},
      {"iteration deadline in ms", configuration.iteration_deadline_ms(), 1, INT32_MAX},
      {"bytes of replay log", configuration.replay_log_memory(), 0, INT64_MAX},
  };
  for (const auto& [name, value, least, most] : rows) {
    if (value < least || value > most) {
      return InvalidArgument("the master wants ", name, " ", value, ", expected ", least, " to ",
                             most);
    }
  }
  if (configuration.has_outlier_threshold() && !(configuration.outlier_threshold() >= 0)) {
    return InvalidArgument("the master wants outliers above ", configuration.outlier_threshold(),
                           ", expected a number >= 0");
  }
  TREADLE_RETURN_IF_ERROR(CheckNames(configuration));
  const bool cuda = configuration.backend() == kCuda;
  if (!cuda && configuration.backend() != kCpu) {
    return Unimplemented("backend is ", Quoted(configuration.backend()),
                         ", this worker has: cpu, cuda");
  }
  if (configuration.kv_dtype() == Name(cuda ? DType::kI8 : DType::kBF16)) {
    return InvalidArgument("the K/V cache is to be ", configuration.kv_dtype(), ", expected ",
                           cuda ? "f16, bf16 or f32 on a GPU" : "f16, f32 or int8 on the CPU");
  }
  if (cuda && gpus.gpus.empty()) {
    return absl::FailedPreconditionError(Str("this worker has no GPU: ", gpus.none));
  }
  if (cuda && configuration.tensor_parallel() > static_cast<int64_t>(gpus.gpus.size())) {
    return absl::FailedPreconditionError(Str(configuration.tensor_parallel(),
                                             " ranks need a GPU each, this worker has ",
                                             gpus.gpus.size()));
  }
  return CheckDataPlane(configuration, gpus);
}

}  // namespace

void DescribeMachine(const RankGpus& gpus, control::WorkerHello& out) {
  out.set_memory_available(AvailableMemory().bytes);
  out.set_machine(MachineId());
  out.set_cpus(UsableCpus());
  out.set_gpus(static_cast<int32_t>(gpus.gpus.size()));
  out.set_no_gpu(gpus.none);
  if (gpus.gpus.empty()) return;
  out.set_gpu_memory(std::ranges::min(gpus.gpus, {}, &RankGpus::Gpu::memory_bytes).memory_bytes);
}

absl::StatusOr<std::unique_ptr<WorkerStage>> WorkerStage::Load(
    const control::Configure& configuration, const Checkpoint& checkpoint,
    const RankOptions& options, std::function<void(double)> progress) {
  TREADLE_RETURN_IF_ERROR(Check(configuration, checkpoint, options.gpus));
  std::unique_ptr<WorkerStage> stage(new WorkerStage(configuration, options.gpus));
  TREADLE_RETURN_IF_ERROR(RunAtLowPriority(
      [&] { return stage->LoadRanks(configuration, checkpoint, options, progress); }));
  return stage;
}

WorkerStage::WorkerStage(const control::Configure& configuration, const RankGpus& gpus)
    : on_gpus_(configuration.backend() == kCuda),
      degree_(configuration.tensor_parallel()),
      gpus_(gpus),
      replay_log_bytes_(KeepsLog(configuration) ? configuration.replay_log_memory() : 0),
      options_{.max_batch_tokens = configuration.max_batch_tokens(),
               .kv = {.page_size = configuration.page_size(),
                      .num_pages = {},
                      .dtype = DTypeFrom(configuration.kv_dtype())},
               .stage = configuration.stage(),
               .replay_log = {.wire = ValueOf(kWireTypes, configuration.wire()).value(),
                              .page_size = configuration.page_size()},
               .timeout = std::chrono::milliseconds(configuration.iteration_deadline_ms()),
               .join = on_gpus_ ? gpus.join : RankJoiner()} {}

absl::Status WorkerStage::LoadRanks(const control::Configure& configuration,
                                    const Checkpoint& checkpoint, const RankOptions& options,
                                    const std::function<void(double)>& progress) {
  TREADLE_ASSIGN_OR_RETURN(LoadOptions load, LoadOptionsFrom(configuration));
  load.threads = options.threads > 0 ? options.threads : std::max(1, UsableCpus() / degree_);
  load.progress = progress;
  std::vector<Backend*> backends;
  for (int rank = 0; rank < degree_; ++rank) {
    TREADLE_ASSIGN_OR_RETURN(loaded_.emplace_back().backend,
                             CreateBackend(configuration, options, rank, load.threads));
    backends.push_back(loaded_.back().backend.get());
  }
  TREADLE_ASSIGN_OR_RETURN(auto models, LoadModelRanks(checkpoint, backends, load));
  for (int rank = 0; rank < degree_; ++rank) {
    weight_bytes_ += models[rank]->weight_bytes();
    kv_heads_ += models[rank]->kv_heads();
    loaded_[rank].model = std::move(models[rank]);
  }
  page_bytes_ = KvMemoryOf(checkpoint.config(),
                           {.kv_bytes = {},
                            .max_batch_tokens = options_.max_batch_tokens,
                            .page_size = options_.kv.page_size,
                            .kv_dtype = options_.kv.dtype,
                            .tensor_parallel = degree_,
                            .layers = {configuration.first_layer(), configuration.end_layer()}},
                           {})
                    .bytes_per_page;
  backend_ = loaded_[0].backend->description();
  config_ = loaded_[0].model->config();
  options_.replay_log.hidden = loaded_[0].model->config().hidden;
  return absl::OkStatus();
}

// Bytes that its ranks can have now: of the machine, or as many times the fullest GPU's.
absl::StatusOr<uint64_t> WorkerStage::AvailableBytes() const {
  if (!on_gpus_) return AvailableMemory().bytes;
  uint64_t least = UINT64_MAX;
  for (int rank = 0; rank < degree_; ++rank) {
    TREADLE_ASSIGN_OR_RETURN(const uint64_t bytes, gpus_.free_bytes(rank));
    least = std::min(least, bytes);
  }
  return least * static_cast<uint64_t>(degree_);
}

absl::Status WorkerStage::Describe(control::Loaded& out) const {
  TREADLE_ASSIGN_OR_RETURN(const uint64_t available, AvailableBytes());
  out.set_weight_bytes(weight_bytes_);
  out.set_memory_available(available);
  if (on_gpus_) {
    std::string ids = MachineId();
    for (int rank = 0; rank < degree_; ++rank) ids += " " + gpus_.gpus[rank].id;
    out.set_memory_pool(ids);
  }
  out.set_kv_heads(kv_heads_);
  out.set_backend(backend_);
  EncodePages(kv_pages(), *out.mutable_kv_pages());
  return absl::OkStatus();
}

// Pages of the system are taken as they are written to, so that a cache too large would be found
// out long after the start.
absl::Status WorkerStage::CheckRoom(const PageCounts& kv_pages, int memory) const {
  TREADLE_ASSIGN_OR_RETURN(uint64_t available, AvailableBytes());
  // The file holds already what a process before has left in it.
  struct stat kept {};
  if (memory >= 0 && !on_gpus_ && fstat(memory, &kept) == 0) {
    available += static_cast<uint64_t>(kept.st_blocks) * 512;
  }
  uint64_t bytes = 0;
  for (const PageKind kind : kPageKinds) {
    bytes += static_cast<uint64_t>(kv_pages[kind]) * static_cast<uint64_t>(page_bytes_[kind]);
  }
  if (bytes <= available) return absl::OkStatus();
  return ResourceExhausted("the K/V cache of ", kv_pages, " pages, as the master asks, needs ",
                           bytes >> 20, " MiB, this worker can have ", available >> 20,
                           " MiB; lower --kv-memory of the server");
}

absl::Status WorkerStage::Reserve(const PageCounts& kv_pages, int memory,
                                  std::string_view configuration, StageRanks::Events events) {
  TREADLE_CHECK(!ranks_);
  TREADLE_RETURN_IF_ERROR(CheckRoom(kv_pages, memory));
  if (memory >= 0 && !on_gpus_) {
    TREADLE_ASSIGN_OR_RETURN(memory_, KeptMemory::Open(memory, Str(configuration, kv_pages)));
    options_.kv.memory = options_.replay_log.memory = memory_.get();
  }
  options_.kv.num_pages = kv_pages;
  options_.replay_log.pages = kv_pages[PageKind::kWhole];
  options_.replay_log.pages = ReplayLog::PagesIn(replay_log_bytes_, options_.replay_log);
  return RunAtLowPriority([&] {
    TREADLE_ASSIGN_OR_RETURN(auto ranks, StageRanks::Create(std::move(loaded_), options_));
    TREADLE_RETURN_IF_ERROR(ranks->Start(std::move(events)));
    ranks_ = std::move(ranks);
    return absl::OkStatus();
  });
}

}  // namespace treadle
