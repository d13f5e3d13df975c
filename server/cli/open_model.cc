#include "server/cli/open_model.h"

#include <fstream>
#include <limits>
#include <utility>

#include "engine/local_engine.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/status.h"
#include "models/checkpoint.h"
#include "models/model.h"

namespace treadle {
namespace {

// Bytes that the system can give without swapping.
int64_t AvailableMemory() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  int64_t kilobytes = 0;
  while (meminfo >> key >> kilobytes) {
    if (key == "MemAvailable:") return kilobytes * 1024;
    meminfo.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return int64_t{1} << 30;
}

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
absl::Status CheckWeightsFit(const Checkpoint& checkpoint, const WeightPlan& weights) {
  const auto needed = static_cast<int64_t>(weights.EstimateBytes(checkpoint));
  const int64_t available = AvailableMemory();
  if (needed <= available) return absl::OkStatus();
  return InvalidArgument(checkpoint.path(), ": its weights need ", needed >> 20,
                         " MiB of memory, this machine can give ", available >> 20,
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

}  // namespace

absl::StatusOr<OpenedModel> OpenModel(const ServeOptions& options,
                                      std::function<void(double)> progress) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                           Checkpoint::Open(options.model));
  const ModelConfig& config = checkpoint->config();
  if (options.max_context > config.context) {
    return InvalidArgument("--max-context is ", options.max_context, ", expected at most ",
                           config.context, ", what the model allows");
  }
  TREADLE_RETURN_IF_ERROR(CheckWeightsFit(*checkpoint, options.weights));
  OpenedModel opened;
  opened.notice = config.notice;
  if (const std::string converting = options.weights.Notice(*checkpoint); !converting.empty()) {
    opened.notice += (opened.notice.empty() ? "" : "; ") + converting;
  }
  ServedModel& served = opened.served;
  served.name = checkpoint->model_name();
  served.architecture = config.architecture;
  served.parameters = CountParameters(*checkpoint);
  served.vocab = static_cast<int32_t>(config.vocab);
  served.max_context = options.max_context > 0 ? options.max_context : config.context;
  TREADLE_RETURN_IF_ERROR(ReadTextSide(*checkpoint, served));

  CpuBackendOptions cpu;
  cpu.threads = static_cast<int>(options.threads);
  cpu.pin = options.pin_threads;
  cpu.compute = ComputeFrom(options.compute);
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, CreateCpuBackend(cpu));
  served.backend = backend->description();

  LoadOptions load;
  load.max_batch_tokens = options.max_batch_tokens;
  load.max_context = served.max_context;
  load.progress = std::move(progress);
  load.weights = options.weights;
  load.threads = static_cast<int>(options.threads);
  load.outlier_threshold = options.outlier_threshold;
  load.outlier_rule =
      options.outlier_rule == "per-call" ? OutlierRule::kPerCall : OutlierRule::kPerRow;
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::Load(*checkpoint, *backend, load));
  opened.weight_bytes = model->weight_bytes();

  KvMemoryRequest memory;
  if (options.kv_memory > 0) memory.kv_bytes = options.kv_memory;
  memory.available_bytes = AvailableMemory();
  memory.max_batch_size = options.max_batch_size;
  memory.max_context = served.max_context;
  memory.page_size = options.page_size;
  memory.kv_dtype = options.kv_dtype == "f32" ? DType::kF32 : DType::kF16;
  TREADLE_ASSIGN_OR_RETURN(opened.kv, PlanKvMemory(config, memory));
  served.kv_pages = opened.kv.pages;
  served.page_size = options.page_size;

  LocalEngineOptions engine;
  engine.max_batch_tokens = options.max_batch_tokens;
  engine.page_size = options.page_size;
  engine.kv_pages = opened.kv.pages;
  engine.kv_dtype = memory.kv_dtype;
  engine.depth = static_cast<int>(options.engine_depth);
  engine.iteration_deadline = options.iteration_deadline;
  TREADLE_ASSIGN_OR_RETURN(opened.engine,
                           LocalEngine::Create(std::move(backend), std::move(model), engine));
  return opened;
}

SchedulingOptions SchedulingFrom(const ServeOptions& options) {
  SchedulingOptions scheduling;
  scheduling.max_batch_size = options.max_batch_size;
  scheduling.max_batch_tokens = options.max_batch_tokens;
  scheduling.max_queue = options.max_queue;
  scheduling.policy = options.policy;
  return scheduling;
}

}  // namespace treadle
