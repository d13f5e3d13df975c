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
#include "base/version.h"
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

absl::Status ReadTextSide(const Checkpoint& checkpoint, ServedModel& served) {
  if (checkpoint.tokenizer() == nullptr) {
    served.chat_template_problem = "it has no tokenizer";
    return absl::OkStatus();
  }
  TREADLE_ASSIGN_OR_RETURN(served.tokenizer, Tokenizer::Create(*checkpoint.tokenizer()));
  served.constraints = ConstraintCompiler::Create(*served.tokenizer, served.vocab, served.end_ids);
  if (checkpoint.kind() == Checkpoint::Kind::kHuggingFace) {
    served.tokenizer_files = [files = checkpoint.text_files()] { return ContentsOf(files); };
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
      Str(kVersion, "\n", weights, "\n", options.weights.text(), "\n",
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
    TREADLE_RETURN_IF_ERROR(checkpoint.text_files().status());
    for (const auto& [name, file] : *checkpoint.text_files()) {
      TREADLE_ASSIGN_OR_RETURN(const std::string sum, file->Sum());
      key += Str(name, " ", sum, "\n");
    }
  }
  return key;
}

// The model's names for clients. A random model's path is its shape.
std::vector<std::string> NamesOf(const ServeOptions& options, const Checkpoint& checkpoint) {
  if (!options.served_model_names.empty()) return options.served_model_names;
  const std::string& path = checkpoint.path();
  return {
      Cut(Printable(path.starts_with(kRandomPrefix) ? checkpoint.model_name() : ModelNameOf(path)),
          kMaxModelName)};
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
  opened.AddNotice(options.weights.Notice(*checkpoint));
  ServedModel& served = opened.served;
  served.names = NamesOf(options, *checkpoint);
  served.name = served.names.front();
  served.architecture = config.architecture;
  for (const StoredTensor& tensor : checkpoint->tensors()) served.parameters += tensor.Elements();
  served.vocab = static_cast<int32_t>(config.vocab);
  served.hidden = config.hidden;
  served.end_ids = checkpoint->end_ids();
  served.max_context = options.max_context;
  served.sampling_defaults = sampling;
  TREADLE_RETURN_IF_ERROR(ReadTextSide(*checkpoint, served));
  TREADLE_RETURN_IF_ERROR(AddAdapters(options, config, opened));

  // Beside the loading, which reads the same files.
  auto weights = std::async(std::launch::async, [&] { return Fingerprint(*checkpoint); });
  TREADLE_RETURN_IF_ERROR(OpenEngine(checked, std::move(progress), log, opened));
  // Whole pages may be a little less than what was asked for.
  const int64_t kv_memory = std::max(options.kv_memory, opened.kv.bytes);
  if (options.prefix_cache_memory > kv_memory) {
    return InvalidArgument("--prefix-cache-memory is ", ShowBytes(options.prefix_cache_memory),
                           ", expected at most the K/V cache's ", ShowBytes(kv_memory));
  }
  if (draft) {
    TREADLE_ASSIGN_OR_RETURN(OpenedDraft loaded, OpenDraftModel(*draft, options, opened.kv, log));
    opened.draft = std::move(loaded.model);
    opened.AddNotice(loaded.notice);
  }
  served.kv_pages = opened.kv.pages;
  served.paging = opened.kv.paging;
  TREADLE_ASSIGN_OR_RETURN(opened.setup.fingerprint, weights.get());
  TREADLE_ASSIGN_OR_RETURN(opened.numerics_key,
                           NumericsKey(options, *checkpoint, opened, opened.setup.fingerprint));
  served.fingerprint = "fp_" + Digest(opened.numerics_key).substr(0, 10);
  if (options.record.empty()) return opened;
  opened.setup.version = kVersion;
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
  // An iteration of one row reads all weights; a position adds its K and V.
  int64_t position = 0;
  for (const PageKind kind : kPageKinds) position += opened.kv.bytes_per_token[kind];
  scheduling.position_share = static_cast<double>(position) /
                              static_cast<double>(std::max<uint64_t>(opened.weight_bytes, 1));
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
