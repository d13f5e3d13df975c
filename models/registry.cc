#include "models/registry.h"

#include "base/status.h"
#include "models/architectures/gpt2.h"
#include "models/architectures/llama.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

constexpr Architecture kArchitectures[] = {{"llama", LoadLlama}, {"gpt2", LoadGpt2}};

}  // namespace

const Architecture* FindArchitecture(std::string_view name) {
  for (const Architecture& row : kArchitectures) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

std::string KnownArchitectures() {
  std::string names;
  for (const Architecture& row : kArchitectures) {
    names += Str(names.empty() ? "" : ", ", row.name);
  }
  return names;
}

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const Checkpoint& checkpoint, Backend& backend,
                                                   const LoadOptions& options) {
  const ModelConfig& config = checkpoint.config();
  const Architecture* architecture = FindArchitecture(config.architecture);
  if (architecture == nullptr) {
    return Unimplemented(checkpoint.path(), ": architecture '", config.architecture,
                         "', expected one of ", KnownArchitectures());
  }
  TREADLE_CHECK(options.max_batch_tokens > 0 && options.max_head_rows > 0);
  TREADLE_RETURN_IF_ERROR(options.weights.CheckAgainst(checkpoint));
  LoadOptions complete = options;
  if (complete.layers.begin == complete.layers.end) complete.layers = {0, config.layers};
  if (complete.layers.begin < 0 || complete.layers.begin > complete.layers.end ||
      complete.layers.end > config.layers) {
    return InvalidArgument(checkpoint.path(), ": layers ", complete.layers.begin, " to ",
                           complete.layers.end, ", expected a range within 0 to ", config.layers);
  }
  TREADLE_RETURN_IF_ERROR(CheckShard(checkpoint, complete.weights, complete.shard.size));
  if (complete.shard.rank < 0 || complete.shard.rank >= complete.shard.size) {
    return InvalidArgument(checkpoint.path(), ": rank ", complete.shard.rank, " of ",
                           complete.shard.size);
  }
  if (complete.max_context == 0) complete.max_context = config.context;
  if (complete.max_context < 1 || complete.max_context > config.context) {
    return InvalidArgument(checkpoint.path(), ": context of ", complete.max_context,
                           ", expected 1 to ", config.context);
  }
  return architecture->load(checkpoint, backend, complete);
}

}  // namespace treadle
