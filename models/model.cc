#include "models/model.h"

#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "models/adapters/adapter_file.h"
#include "models/checkpoints/shared_conversion.h"
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
  if (config.latent_dim > 0 && !HasLatents(backend)) {
    return Unimplemented(checkpoint.path(), ": models of ", config.architecture,
                         " attend over latents, which the backend ", backend.name(),
                         " cannot do; expected the backend cpu");
  }
  for (int64_t i = complete.layers.begin; i < complete.layers.end; ++i) {
    if (const int64_t source = config.KvSource(i); source < complete.layers.begin) {
      return InvalidArgument(checkpoint.path(), ": layers ", complete.layers.begin, " to ",
                             complete.layers.end, " read the K/V of layer ", source,
                             ", expected a range that begins with 0 to ", config.LastStageBegin());
    }
  }
  TREADLE_RETURN_IF_ERROR(CheckShard(checkpoint, complete.weights, complete.shard.size));
  if (complete.shard.rank < 0 || complete.shard.rank >= complete.shard.size) {
    return InvalidArgument(checkpoint.path(), ": rank ", complete.shard.rank, " of ",
                           complete.shard.size);
  }
  if (complete.max_context == 0) complete.max_context = config.context;
  if (complete.max_context < 1 || complete.max_context > config.context) {
    return InvalidArgument(
        checkpoint.path(), ": context of ", complete.max_context, ", expected 1 to ",
        config.context, config.context == config.attention_chunk ? ", its attention's chunk" : "");
  }
  auto model = std::make_unique<Decoder>(backend);
  const absl::Status loaded = model->Load(checkpoint, complete);
  TREADLE_RETURN_IF_ERROR(checkpoint.CheckUnchanged());  // it would be why
  TREADLE_RETURN_IF_ERROR(loaded);
  return model;
}

absl::StatusOr<std::shared_ptr<const Adapter>> Model::LoadAdapter(const AdapterFile& file) const {
  return Unimplemented(file.path(), ": this model takes no adapters");
}

absl::StatusOr<std::vector<std::unique_ptr<Model>>> LoadModelRanks(
    const Checkpoint& checkpoint, std::span<Backend* const> backends, const LoadOptions& options) {
  const size_t size = backends.size();
  SharedConversion conversion(static_cast<int>(size));
  Mutex mutex;
  std::vector<double> fractions(size);     // that each rank has loaded
  const auto progress = options.progress;  // its own state: threads copy `options` while it is told
  std::vector<std::unique_ptr<Model>> models(size);
  std::vector<absl::Status> statuses(size);
  const auto load_rank = [&](size_t rank) {
    LoadOptions load = options;
    load.shard = {static_cast<int>(rank), static_cast<int>(size)};
    if (progress) {
      load.progress = [&, rank](double fraction) {
        MutexLock lock(mutex);
        fractions[rank] = fraction;
        const double sum = std::accumulate(fractions.begin(), fractions.end(), 0.0);
        progress(sum / static_cast<double>(size));
      };
    }
    load.conversion = &conversion;
    auto model = Model::Load(checkpoint, *backends[rank], load);
    if (!model.ok()) conversion.Leave();
    statuses[rank] = model.status();
    if (model.ok()) models[rank] = *std::move(model);
  };
  std::vector<std::thread> threads;
  try {
    for (size_t rank = 1; rank < size; ++rank) threads.emplace_back(load_rank, rank);
    load_rank(0);
  } catch (const std::system_error& error) {
    conversion.Leave();
    statuses.push_back(ResourceExhausted("loading thread: ", error.what()));
  }
  for (std::thread& thread : threads) thread.join();
  absl::Status failed;  // one that failed by itself, if there is one
  for (const absl::Status& status : statuses) {
    if (!status.ok() && (failed.ok() || absl::IsCancelled(failed))) failed = status;
  }
  if (!failed.ok()) return failed;
  return models;
}

}  // namespace treadle
