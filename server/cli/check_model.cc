// All that can be found wrong with a model and its flags before it is loaded.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "base/memory.h"
#include "base/status.h"
#include "engine/stage.h"
#include "models/architectures/config_fields.h"
#include "models/architectures/rotary_embedding.h"
#include "models/checkpoints/checkpoint.h"
#include "models/tensor_parallel.h"
#include "server/cli/open_draft_model.h"
#include "server/cli/open_model.h"
#include "server/flag_values.h"
#include "server/session/sampling_defaults.h"

namespace treadle {
namespace {

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
                             const RankDevices& devices) {
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
  const int64_t tables = ArchitectureOf(config).rotary
                             ? ranks * RotaryEmbedding::Bytes(config, options.max_context)
                             : 0;
  const int64_t left = available - weights - activations - tables;
  if (left >= 0) return here ? CheckCacheFits(options, left, owner) : absl::OkStatus();
  if (weights + activations <= available) {
    return InvalidArgument(checkpoint.path(), ": tables of rotations for a context of ",
                           options.max_context, " tokens need ", tables >> 20, " MiB of memory, ",
                           owner, " can give ", (available - weights - activations) >> 20,
                           " MiB beside weights and activations; lower --max-context (",
                           ContextKey(checkpoint), " of the model is ", config.context, ")");
  }
  return InvalidArgument(
      checkpoint.path(), ": its weights need ", weights >> 20, " MiB of memory and activations ",
      activations >> 20, " MiB (--max-batch-tokens ", options.max_batch_tokens, "), ", owner,
      " can give ", available >> 20, " MiB; --weights nf4 makes them smaller, as do other formats");
}

absl::StatusOr<std::optional<SamplingParameters>> SamplingOf(const Checkpoint& checkpoint,
                                                             const ServeOptions& options) {
  if (options.generation_config == GenerationConfig::kNone) return std::nullopt;
  TREADLE_ASSIGN_OR_RETURN(const RecommendedSampling sampling, checkpoint.Sampling());
  if (sampling.values.empty()) return std::nullopt;
  return ReadSamplingDefaults(sampling.values, sampling.source);
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
  TREADLE_RETURN_IF_ERROR(CheckWeightsFit(*checkpoint, options, devices));
  TREADLE_ASSIGN_OR_RETURN(auto draft, CheckDraftModel(options, *checkpoint));
  return CheckedModel{std::move(checkpoint), std::move(draft), std::move(devices),
                      std::move(options), sampling};
}

}  // namespace treadle
