#include "server/cli/open_model.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "base/sha256.h"
#include "base/status.h"
#include "base/utf8.h"
#include "engine/kv/kv_cache.h"
#include "engine/local_engine.h"
#include "engine/placement.h"
#include "engine/remote/remote_engine.h"
#include "engine/remote/worker/worker_stage.h"
#include "engine/stage.h"
#include "kernels/cpu/cpu_backend.h"
#include "models/architectures/config_fields.h"
#include "models/architectures/rotary_embedding.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/fingerprint.h"
#include "models/checkpoints/huggingface/text_files.h"
#include "models/checkpoints/inspect/inspect.h"
#include "models/checkpoints/model_path.h"
#include "models/model.h"
#include "models/tensor_parallel.h"
#include "models/text/tokenizer_json.h"
#include "server/cli/daemon.h"
#include "server/cli/open_draft_model.h"
#include "server/cli/progress.h"
#include "server/cli/rank_devices.h"
#include "server/cli/workers/worker_supervisor.h"
#include "server/flag_values.h"
#include "server/session/sampling_defaults.h"

namespace treadle {
namespace {

int64_t CountParameters(const Checkpoint& checkpoint) {
  int64_t sum = 0;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    int64_t elements = 1;
    for (int64_t extent : tensor.shape) elements *= extent;
    sum += elements;
  }
  return sum;
}

// The name in the checkpoint's file of the context that it allows.
std::string ContextKey(const Checkpoint& checkpoint) {
  const Architecture& architecture = ArchitectureOf(checkpoint.config());
  const ConfigField<ModelConfig>& context = FieldOf(&ModelConfig::context);
  return checkpoint.kind() == Checkpoint::Kind::kGguf
             ? Str(architecture.GgufName(), ".", context.gguf)
             : JsonFieldOf(architecture, context).name;
}

// `left`: bytes beside weights, activations and tables, for the caches of all stages.
absl::Status CheckCacheFits(const ServeOptions& options, int64_t left, std::string_view owner) {
  const int64_t each = left / options.stages();
  if (options.kv_memory <= each) return absl::OkStatus();
  return InvalidArgument(
      "--kv-memory is ", ShowBytes(options.kv_memory),
      options.stages() > 1 ? Str(" in each of ", options.stages(), " stages") : "", ", ", owner,
      " can give ", left >> 20, " MiB beside the weights; expected at most ", each >> 20,
      "M, or auto");
}

// Before minutes of loading, and before the system ends the process. Workers that were started
// elsewhere see to their own memory; what they cost is measured here, on one rank with its tables.
absl::Status CheckWeightsFit(const Checkpoint& checkpoint, const ServeOptions& options,
                             const RankDevices& devices, int64_t max_context) {
  const bool here = options.workers.empty();
  const int64_t weights =
      here ? static_cast<int64_t>(options.weights.EstimateBytes(checkpoint)) : 0;
  const int64_t activations = (here ? options.tensor_parallel : 1) *
                              Stage::ActivationBytes(checkpoint.config(), options.max_batch_tokens);
  const auto available =
      here ? devices.AvailableBytes() : static_cast<int64_t>(AvailableMemory().bytes);
  const std::string_view owner = here ? devices.owner() : "this machine";
  const ModelConfig& config = checkpoint.config();
  const int64_t ranks = here ? options.stages() * options.tensor_parallel : 1;
  const int64_t tables =
      ArchitectureOf(config).rotary ? ranks * RotaryEmbedding::Bytes(config, max_context) : 0;
  const int64_t left = available - weights - activations - tables;
  if (left >= 0) return here ? CheckCacheFits(options, left, owner) : absl::OkStatus();
  if (weights + activations <= available) {
    return InvalidArgument(checkpoint.path(), ": tables of rotations for a context of ",
                           max_context, " tokens need ", tables >> 20, " MiB of memory, ", owner,
                           " can give ", (available - weights - activations) >> 20,
                           " MiB beside weights and activations; lower --max-context (",
                           ContextKey(checkpoint), " of the model is ", config.context, ")");
  }
  return InvalidArgument(
      checkpoint.path(), ": its weights need ", weights >> 20, " MiB of memory and activations ",
      activations >> 20, " MiB (--max-batch-tokens ", options.max_batch_tokens, "), ", owner,
      " can give ", available >> 20, " MiB; --weights nf4 makes them smaller, as do other formats");
}

absl::Status ReadTextSide(const Checkpoint& checkpoint, ServedModel& served) {
  if (checkpoint.tokenizer() == nullptr) {
    served.chat_template_problem = "it has no tokenizer";
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(served.tokenizer, Tokenizer::Create(*checkpoint.tokenizer()));
  served.constraints = ConstraintCompiler::Create(*served.tokenizer, served.vocab, served.end_ids);
  if (checkpoint.kind() == Checkpoint::Kind::kHuggingFace) {
    served.tokenizer_files = [folder = checkpoint.path()] { return ReadTextFiles(folder); };
  } else {
    served.tokenizer_files = [&spec = served.tokenizer->spec(),
                              chat_template = checkpoint.chat_template(),
                              context = checkpoint.config().context] {
      return TokenizerJsonFiles(spec, chat_template, context);
    };
  }
  if (checkpoint.chat_template().empty()) {
    served.chat_template_problem = "the checkpoint has none";
    return absl::OkStatus();
  }
  // A template that we cannot read costs chat, not the model.
  auto parsed = ChatTemplate::Parse(checkpoint.chat_template());
  absl::Status problem = parsed.status();
  if (problem.ok()) problem = parsed->CheckCost();
  if (problem.ok()) {
    served.chat_template = std::move(*parsed);
  } else {
    served.chat_template_problem = std::string(problem.message());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<SamplingParameters>> SamplingOf(const Checkpoint& checkpoint,
                                                             const ServeOptions& options) {
  if (options.generation_config == GenerationConfig::kNone) return std::nullopt;
  TREADLE_ASSIGN_OR_RETURN(const RecommendedSampling sampling, checkpoint.Sampling());
  if (sampling.values.empty()) return std::nullopt;
  return ReadSamplingDefaults(sampling.values, sampling.source);
}

// A worker of this machine that was started again is there after a moment; one that is not by then
// has to be replaced.
constexpr std::chrono::seconds kLocalConnectDeadline{10};

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

void AddNotice(const std::string& notice, OpenedModel& opened) {
  if (notice.empty()) return;
  opened.notice += (opened.notice.empty() ? "" : "; ") + notice;
}

// An engine in worker processes, which owns those that were started for it: placement, workers of
// this machine where none are given, attachment and loading. Errors say which flag, layer or
// worker. `log`: what workers of this machine say.
absl::Status UseWorkers(const std::shared_ptr<const Checkpoint>& checkpoint,
                        const ServeOptions& options, const RankDevices& devices,
                        std::function<void(double)> progress, const LogSink& log,
                        OpenedModel& opened) {
  const int64_t max_context = opened.served.max_context;
  TREADLE_ASSIGN_OR_RETURN(const std::vector<PlacedStage> placed,
                           Place(*checkpoint, options, max_context));
  RemoteEngineOptions engine = EngineOptions(options, devices, max_context);
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
    AddNotice(Str("stage ", stage, " at ", addresses[stage], ": layers ", layers.begin, "-",
                  layers.end - 1),
              opened);
  }
  engine.spares.assign(addresses.begin() + options.stages(), addresses.end());
  KvMemoryRequest memory;
  memory.max_batch_tokens = options.max_batch_tokens;
  memory.page_size = options.page_size;
  memory.kv_dtype = options.kv_dtype;
  memory.tensor_parallel = options.tensor_parallel;
  engine.checkpoint = checkpoint;
  engine.progress = std::move(progress);
  TREADLE_ASSIGN_OR_RETURN(auto remote, RemoteEngine::Create(std::move(engine)));
  opened.kv = KvMemoryOf(checkpoint->config(), memory, remote->kv_pages());
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
absl::Status UseRanks(const Checkpoint& checkpoint, const ServeOptions& options,
                      const RankDevices& devices, std::function<void(double)> progress,
                      OpenedModel& opened) {
  const int64_t max_context = opened.served.max_context;
  TREADLE_ASSIGN_OR_RETURN(
      std::vector<StageRanks::Rank> ranks,
      LoadRanks(checkpoint, options, devices, max_context, std::move(progress)));
  opened.served.backend = opened.rank_backend = ranks[0].backend->description();
  if (ranks.size() > 1) {
    opened.served.backend = Str(ranks.size(), " ranks of ", opened.served.backend);
  }
  for (const StageRanks::Rank& rank : ranks) opened.weight_bytes += rank.model->weight_bytes();

  KvMemoryRequest memory;
  if (options.kv_memory > 0) memory.kv_bytes = options.kv_memory;
  memory.available_bytes = devices.AvailableBytes();
  memory.available_share = devices.CacheShare();
  memory.max_batch_size = options.max_batch_size;
  memory.max_batch_tokens = options.max_batch_tokens;
  memory.max_context = max_context;
  memory.page_size = options.page_size;
  memory.kv_dtype = options.kv_dtype;
  memory.tensor_parallel = options.tensor_parallel;
  TREADLE_ASSIGN_OR_RETURN(opened.kv, PlanKvMemory(checkpoint.config(), memory));

  LocalEngineOptions engine;
  engine.max_batch_tokens = options.max_batch_tokens;
  engine.page_size = options.page_size;
  engine.kv_pages = opened.kv.pages;
  engine.kv_dtype = memory.kv_dtype;
  engine.depth = static_cast<int>(options.engine_depth);
  engine.iteration_deadline = options.iteration_deadline;
  engine.join = devices.Joiner();
  TREADLE_ASSIGN_OR_RETURN(opened.engine, LocalEngine::Create(std::move(ranks), engine));
  opened.setup.end_layers = {checkpoint.config().layers};
  return absl::OkStatus();
}

// Adds to an error of a K/V cache that found no memory which flag makes it smaller.
absl::Status WithKvMemory(const absl::Status& status, const ServeOptions& options) {
  if (status.message().find(kNoKvMemory) == std::string_view::npos) return status;
  return {status.code(),
          Str(status.message(), "; --kv-memory is ",
              options.kv_memory == 0
                  ? std::string("auto, expected a smaller size, written like 512M or 2G")
                  : Str(ShowBytes(options.kv_memory), ", expected a smaller one"))};
}

std::string Digest(std::string_view text) {
  Sha256 sum;
  sum.Add(std::as_bytes(std::span(text)));
  return sum.Finish();
}

// The numerics key of docs/design.md (N4): all that decides the bits and the text of an answer, and
// nothing else. `weights`: Fingerprint of the checkpoint.
absl::StatusOr<std::string> NumericsKey(const ServeOptions& options, const Checkpoint& checkpoint,
                                        const OpenedModel& opened, const std::string& weights) {
  const bool usual = options.compute == ComputeMode::kAuto && !opened.cuda;
  const ComputeMode compute = usual ? kCpuAuto : options.compute;
  std::string key =
      Str(TREADLE_VERSION, "\n", weights, "\n", options.weights.text(), "\n",
          options.outlier_threshold.value_or(-1), "\n", static_cast<int>(options.outlier_rule),
          "\n", Name(compute), "\n", Name(options.kv_dtype), "\n", options.tensor_parallel, "\n");
  if (opened.cuda) {
    key += Str(opened.rank_backend, "\n", Name(options.dtype), "\n", options.deterministic, "\n");
  }
  // Where layers are cut decides bits only if the cut rounds.
  if (options.wire != WireType::kF32) {
    key += Str(Name(options.wire), "\n");
    for (const int64_t end : opened.setup.end_layers) key += Str(end, "\n");
  }
  // Sums over a state begin at each page.
  if (checkpoint.config().HasStates()) key += Str(options.page_size, "\n");
  // Two sets of rotary factors, chosen by the context.
  if (const auto& rope = checkpoint.config().long_rope) {
    key += Str(opened.served.max_context > rope->original_context ? "long\n" : "short\n");
  }
  if (opened.served.sampling_defaults) key += EffectsJson(*opened.served.sampling_defaults) + "\n";
  // A GGUF file has its tokenizer within.
  if (checkpoint.kind() == Checkpoint::Kind::kHuggingFace && opened.served.tokenizer) {
    TREADLE_ASSIGN_OR_RETURN(const auto files, opened.served.tokenizer_files());
    for (const auto& [name, text] : files) key += Str(name, " ", Digest(text), "\n");
  }
  return key;
}

// An iteration of one row reads all weights; a position adds its K and V.
double PositionShare(const OpenedModel& opened) {
  int64_t bytes = 0;
  for (const PageKind kind : kPageKinds) bytes += opened.kv.bytes_per_token[kind];
  return static_cast<double>(bytes) /
         static_cast<double>(std::max<uint64_t>(opened.weight_bytes, 1));
}

// The adapters that options name.
absl::Status AddAdapters(const ServeOptions& options, const ModelConfig& config,
                         OpenedModel& opened) {
  const bool exact =
      opened.cuda ? options.dtype == DType::kF32 : options.compute == ComputeMode::kExact;
  opened.served.adapters = std::make_shared<AdapterRegistry>(
      config, AdapterRegistry::Options{.taken = opened.served.names,
                                       .folder = options.lora_dir,
                                       .max_loaded = options.max_loras,
                                       .memory = options.lora_memory,
                                       .floats = exact ? DType::kF32 : DType::kF16});
  for (const std::string& lora : options.loras) {
    const size_t sign = lora.find('=');
    const absl::Status added =
        opened.served.adapters->Add(lora.substr(0, sign), lora.substr(sign + 1));
    if (!added.ok()) return absl::Status(added.code(), Str("--lora: ", added.message()));
  }
  std::error_code error;
  if (options.lora_dir.empty() || std::filesystem::is_directory(options.lora_dir, error)) {
    return absl::OkStatus();
  }
  return NotFound("--lora-dir: ", options.lora_dir, " is no folder");
}

}  // namespace

absl::StatusOr<CheckedModel> CheckModel(const ServeOptions& given) {
  TREADLE_RETURN_IF_ERROR(CheckServeOptions(given));
  TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<const Checkpoint> checkpoint,
                           Checkpoint::Open(given.model));
  ServeOptions options = given;
  const ModelConfig& config = checkpoint->config();
  if (options.max_context > config.context) {
    return InvalidArgument("--max-context is ", options.max_context, ", expected at most ",
                           config.context, ", what the model allows",
                           config.context == config.attention_chunk
                               ? ": its layers attend within chunks of so many positions"
                               : "");
  }
  TREADLE_RETURN_IF_ERROR(
      CheckShard(*checkpoint, options.weights, static_cast<int>(options.tensor_parallel)));
  if (options.stages() > config.layers) {
    return InvalidArgument("--pipeline-parallel is ", options.stages(), ", expected at most ",
                           config.layers, ", one layer in each stage");
  }
  TREADLE_ASSIGN_OR_RETURN(auto sampling, SamplingOf(*checkpoint, options));
  TREADLE_ASSIGN_OR_RETURN(RankDevices devices, RankDevices::Choose(options));
  if (const FolderSpace& disk = options.prefix_cache_disk; !disk.folder.empty()) {
    const bool windows = config.RingLayers(0, config.layers) > 0;
    if (devices.cuda() || windows) {
      return InvalidArgument("--prefix-cache-disk is set, but ",
                             windows ? "the model has layers with a window; expected another model"
                                     : "the device is cuda; expected --device cpu",
                             ", or --prefix-cache-disk none");
    }
  }
  // The engine is made for what auto may choose, and the K/V cache for as many requests as ever.
  if (options.max_batch_tokens == 0) {
    options.max_batch_tokens = std::max(2 * options.max_batch_size, kDefaultBatchTokens);
  }
  if (options.max_batch_size == 0) options.max_batch_size = kDefaultBatchSize;
  if (options.max_context == 0) options.max_context = config.context;
  TREADLE_RETURN_IF_ERROR(CheckWeightsFit(*checkpoint, options, devices, options.max_context));
  TREADLE_ASSIGN_OR_RETURN(auto draft, CheckDraftModel(options, *checkpoint));
  return CheckedModel{std::move(checkpoint), std::move(draft), std::move(devices),
                      std::move(options), sampling};
}

absl::StatusOr<OpenedModel> OpenModel(const ServeOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(const CheckedModel checked, CheckModel(options));
  return OpenModel(checked,
                   ShowProgress("loading " + options.model, checked.checkpoint->file_bytes()));
}

absl::StatusOr<OpenedModel> OpenModel(const CheckedModel& checked,
                                      std::function<void(double)> progress, const LogSink& log) {
  const auto& [checkpoint, draft, devices, options, sampling] = checked;
  const ModelConfig& config = checkpoint->config();
  OpenedModel opened;
  opened.max_batch_tokens = options.max_batch_tokens;
  opened.cuda = devices.cuda();
  opened.threads = ThreadsOfRank(options, 1);
  AddNotice(options.weights.Notice(*checkpoint), opened);
  ServedModel& served = opened.served;
  served.names = options.served_model_names;
  if (served.names.empty()) {
    // A random model's path is its shape.
    served.names = {Cut(
        Printable(checkpoint->path().starts_with(kRandomPrefix) ? checkpoint->model_name()
                                                                : ModelNameOf(checkpoint->path())),
        kMaxModelName)};
  }
  served.name = served.names.front();
  served.architecture = config.architecture;
  served.parameters = CountParameters(*checkpoint);
  served.vocab = static_cast<int32_t>(config.vocab);
  served.hidden = config.hidden;
  served.end_ids = checkpoint->end_ids();
  served.max_context = options.max_context;
  served.sampling_defaults = sampling;
  TREADLE_RETURN_IF_ERROR(ReadTextSide(*checkpoint, served));
  TREADLE_RETURN_IF_ERROR(AddAdapters(options, config, opened));

  // Beside the loading, which reads the same files.
  auto weights = std::async(std::launch::async, [&] { return Fingerprint(*checkpoint); });
  TREADLE_RETURN_IF_ERROR(WithKvMemory(
      options.remote() ? UseWorkers(checkpoint, options, devices, std::move(progress), log, opened)
                       : UseRanks(*checkpoint, options, devices, std::move(progress), opened),
      options));
  // Whole pages may be a little less than what was asked for.
  const int64_t kv_memory = std::max(options.kv_memory, opened.kv.bytes);
  if (options.prefix_cache_memory > kv_memory) {
    return InvalidArgument("--prefix-cache-memory is ", ShowBytes(options.prefix_cache_memory),
                           ", expected at most the K/V cache's ", ShowBytes(kv_memory));
  }
  if (draft) {
    TREADLE_ASSIGN_OR_RETURN(OpenedDraft loaded, OpenDraftModel(*draft, options, opened.kv, log));
    opened.draft = std::move(loaded.model);
    AddNotice(loaded.notice, opened);
  }
  served.kv_pages = opened.kv.pages;
  served.paging = opened.kv.paging;
  opened.files = checkpoint->file_states();
  TREADLE_ASSIGN_OR_RETURN(opened.setup.fingerprint, weights.get());
  TREADLE_ASSIGN_OR_RETURN(opened.numerics_key,
                           NumericsKey(options, *checkpoint, opened, opened.setup.fingerprint));
  served.fingerprint = "fp_" + Digest(opened.numerics_key).substr(0, 10);
  if (options.record.empty()) return opened;
  opened.setup.version = TREADLE_VERSION;
  opened.setup.backend = served.backend;
  opened.setup.max_batch_tokens = options.max_batch_tokens;
  opened.setup.max_context = options.max_context;
  opened.setup.kv_pages = opened.kv.pages;
  return opened;
}

void ChooseBatchAtStart(const ServeOptions& options, const OpenedModel& opened,
                        SchedulingOptions& scheduling) {
  AutoBatch& batch = scheduling.batch;
  batch.size = options.max_batch_size == 0;
  batch.tokens = options.max_batch_tokens == 0;
  batch.target_itl = std::chrono::duration<double>(options.target_itl).count();
  batch.context = std::min(batch.context, opened.served.max_context);
  const PageCounts each = opened.served.paging.PagesFor(batch.context);
  for (const PageKind kind : kPageKinds) {
    if (each[kind] == 0) continue;
    batch.most_size = std::min(batch.most_size, opened.served.kv_pages[kind] / each[kind]);
  }
  scheduling.measure = batch.any() || options.max_ttft.count() > 0;
}

SchedulingOptions SchedulingFrom(const ServeOptions& options, const OpenedModel& opened) {
  SchedulingOptions scheduling;
  scheduling.max_batch_tokens = opened.max_batch_tokens;
  scheduling.max_batch_size = options.max_batch_size > 0
                                  ? options.max_batch_size
                                  : std::min(kDefaultBatchSize, opened.max_batch_tokens - 1);
  scheduling.max_queue = options.max_queue;
  scheduling.policy = options.policy;
  scheduling.microbatch_size = options.microbatch_size;
  scheduling.compute_padding = options.padding == Padding::kCompute;
  scheduling.kv_events = options.kv_events;
  scheduling.max_ttft = options.max_ttft;
  scheduling.position_share = PositionShare(opened);
  if (!options.prefix_cache) {
    scheduling.prefix_cache = 0;
  } else if (options.prefix_cache_memory > 0) {
    scheduling.prefix_cache = static_cast<double>(options.prefix_cache_memory) /
                              static_cast<double>(std::max<int64_t>(opened.kv.bytes, 1));
  }
  scheduling.recover = options.on_worker_loss == OnWorkerLoss::kRecover;
  return scheduling;
}

}  // namespace treadle
