#include "server/cli/open_model.h"

#include <fstream>
#include <limits>
#include <utility>

#include "base/status.h"
#include "engine/local_engine.h"
#include "engine/stage.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"
#include "models/tensor_parallel.h"
#include "server/cli/load_ranks.h"
#include "server/cli/open_workers.h"
#include "server/cli/rank_devices.h"

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

// Before minutes of loading, and before the system ends the process.
absl::Status CheckWeightsFit(const Checkpoint& checkpoint, const ServeOptions& options,
                             const RankDevices& devices) {
  const auto weights = static_cast<int64_t>(options.weights.EstimateBytes(checkpoint));
  const int64_t activations = options.tensor_parallel *
                              Stage::ActivationBytes(checkpoint.config(), options.max_batch_tokens);
  const int64_t available = devices.AvailableBytes();
  if (weights + activations <= available) return absl::OkStatus();
  return InvalidArgument(checkpoint.path(), ": its weights need ", weights >> 20,
                         " MiB of memory and activations ", activations >> 20,
                         " MiB (--max-batch-tokens ", options.max_batch_tokens, "), ",
                         devices.owner(), " can give ", available >> 20,
                         " MiB; --weights nf4 makes them smaller, as do other formats");
}

absl::Status ReadTextSide(const Checkpoint& checkpoint, ServedModel& served) {
  if (checkpoint.tokenizer() == nullptr) {
    served.chat_template_problem = "it has no tokenizer";
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(served.tokenizer, Tokenizer::Create(*checkpoint.tokenizer()));
  if (checkpoint.chat_template().empty()) {
    served.chat_template_problem = "the checkpoint has none";
    return absl::OkStatus();
  }
  // A template that we cannot read costs chat, not the model.
  auto parsed = ChatTemplate::Parse(checkpoint.chat_template());
  if (parsed.ok()) {
    served.chat_template = std::move(*parsed);
  } else {
    served.chat_template_problem = std::string(parsed.status().message());
  }
  return absl::OkStatus();
}

// An engine in worker processes.
absl::Status UseWorkers(std::shared_ptr<const Checkpoint> checkpoint, const ServeOptions& options,
                        const RankDevices& devices, LoadListeners listeners, OpenedModel& opened) {
  const ModelConfig& config = checkpoint->config();
  TREADLE_ASSIGN_OR_RETURN(
      OpenedWorkers workers,
      OpenWorkers(checkpoint, options, devices, opened.served.max_context, std::move(listeners)));
  opened.engine = std::move(workers.engine);
  opened.weight_bytes = workers.weight_bytes;
  opened.served.backend = workers.backend;
  opened.served.kv_pages = workers.kv_pages;
  KvMemoryRequest memory;
  memory.page_size = options.page_size;
  memory.kv_dtype = options.kv_dtype;
  memory.tensor_parallel = options.tensor_parallel;
  opened.kv = KvMemoryOf(config, memory, workers.kv_pages);
  opened.notice += (opened.notice.empty() ? "" : "; ") + workers.placement;
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
  opened.served.backend = ranks[0].backend->description();
  if (ranks.size() > 1) {
    opened.served.backend = Str(ranks.size(), " ranks of ", opened.served.backend);
  }
  for (const StageRanks::Rank& rank : ranks) opened.weight_bytes += rank.model->weight_bytes();

  KvMemoryRequest memory;
  if (options.kv_memory > 0) memory.kv_bytes = options.kv_memory;
  memory.available_bytes = devices.AvailableBytes();
  memory.available_share = devices.CacheShare();
  memory.max_batch_size = options.max_batch_size;
  memory.max_context = max_context;
  memory.page_size = options.page_size;
  memory.kv_dtype = options.kv_dtype;
  memory.tensor_parallel = options.tensor_parallel;
  TREADLE_ASSIGN_OR_RETURN(opened.kv, PlanKvMemory(checkpoint.config(), memory));
  opened.served.kv_pages = opened.kv.pages;

  LocalEngineOptions engine;
  engine.max_batch_tokens = options.max_batch_tokens;
  engine.page_size = options.page_size;
  engine.kv_pages = opened.kv.pages;
  engine.kv_dtype = memory.kv_dtype;
  engine.depth = static_cast<int>(options.engine_depth);
  engine.iteration_deadline = options.iteration_deadline;
  engine.join = devices.Joiner();
  TREADLE_ASSIGN_OR_RETURN(opened.engine, LocalEngine::Create(std::move(ranks), engine));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<OpenedModel> OpenModel(const ServeOptions& given,
                                      std::function<void(double)> progress, const LogSink& log) {
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint,
                           Checkpoint::Open(given.model));
  ServeOptions options = given;
  const ModelConfig& config = checkpoint->config();
  if (options.max_context > config.context) {
    return InvalidArgument("--max-context is ", options.max_context, ", expected at most ",
                           config.context, ", what the model allows");
  }
  TREADLE_RETURN_IF_ERROR(
      CheckShard(*checkpoint, options.weights, static_cast<int>(options.tensor_parallel)));
  if (options.stages() > config.layers) {
    return InvalidArgument("--pipeline-parallel is ", options.stages(), ", expected at most ",
                           config.layers, ", one layer in each stage");
  }
  TREADLE_ASSIGN_OR_RETURN(const RankDevices devices, RankDevices::Choose(options));
  options.max_batch_tokens = BatchTokens(options, devices.cuda());
  // Workers that were started elsewhere see to their own memory.
  if (options.workers.empty()) {
    TREADLE_RETURN_IF_ERROR(CheckWeightsFit(*checkpoint, options, devices));
  }
  OpenedModel opened;
  opened.max_batch_tokens = options.max_batch_tokens;
  opened.cuda = devices.cuda();
  opened.threads = ThreadsOfRank(options, 1);
  opened.notice = config.notice;
  if (const std::string converting = options.weights.Notice(*checkpoint); !converting.empty()) {
    opened.notice += (opened.notice.empty() ? "" : "; ") + converting;
  }
  ServedModel& served = opened.served;
  served.name = checkpoint->model_name();
  served.architecture = config.architecture;
  served.parameters = CountParameters(*checkpoint);
  served.vocab = static_cast<int32_t>(config.vocab);
  served.end_ids = checkpoint->end_ids();
  served.max_context = options.max_context > 0 ? options.max_context : config.context;
  TREADLE_RETURN_IF_ERROR(ReadTextSide(*checkpoint, served));

  TREADLE_RETURN_IF_ERROR(
      options.remote()
          ? UseWorkers(checkpoint, options, devices, {std::move(progress), log}, opened)
          : UseRanks(*checkpoint, options, devices, std::move(progress), opened));
  served.page_size = options.page_size;
  return opened;
}

SchedulingOptions SchedulingFrom(const ServeOptions& options, const OpenedModel& opened) {
  SchedulingOptions scheduling;
  scheduling.max_batch_size = options.max_batch_size;
  scheduling.max_batch_tokens = opened.max_batch_tokens;
  scheduling.max_queue = options.max_queue;
  scheduling.policy = options.policy;
  return scheduling;
}

}  // namespace treadle
