#include "models/model.h"

#include "base/status.h"
#include "models/decoder.h"
#include "models/tensor_parallel.h"

namespace treadle {

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const Checkpoint& checkpoint, Backend& backend,
                                                   const LoadOptions& options) {
  const ModelConfig& config = checkpoint.config();
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
  auto model = std::make_unique<Decoder>(backend);
  TREADLE_RETURN_IF_ERROR(model->Load(checkpoint, complete));
  return model;
}

}  // namespace treadle
