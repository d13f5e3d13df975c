#include "server/cli/load_ranks.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "kernels/cpu/thread_pool.h"
#include "models/model.h"

namespace treadle {

LoadOptions LoadOptionsFrom(const ServeOptions& options, int64_t max_context) {
  LoadOptions load;
  load.shard.size = static_cast<int>(options.tensor_parallel);
  load.max_batch_tokens = options.max_batch_tokens;
  load.max_context = max_context;
  load.weights = options.weights;
  load.outlier_threshold = options.outlier_threshold;
  load.outlier_rule = options.outlier_rule;
  return load;
}

int ThreadsOfRank(const ServeOptions& options, int64_t parts) {
  const int64_t threads = options.threads > 0 ? options.threads : UsableCpus();
  return static_cast<int>(std::max<int64_t>(1, threads / parts));
}

absl::StatusOr<std::vector<StageRanks::Rank>> LoadRanks(const Checkpoint& checkpoint,
                                                        const ServeOptions& options,
                                                        const RankDevices& devices,
                                                        int64_t max_context,
                                                        std::function<void(double)> progress) {
  TREADLE_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Backend>> backends, devices.Create());
  std::vector<StageRanks::Rank> ranks(backends.size());
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i].backend = std::move(backends[i]);
  std::vector<Backend*> devices_of_ranks;
  for (StageRanks::Rank& rank : ranks) devices_of_ranks.push_back(rank.backend.get());
  LoadOptions load = LoadOptionsFrom(options, max_context);
  load.threads = ThreadsOfRank(options, options.tensor_parallel);
  load.progress = std::move(progress);
  TREADLE_ASSIGN_OR_RETURN(auto models, LoadModelRanks(checkpoint, devices_of_ranks, load));
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i].model = std::move(models[i]);
  return ranks;
}

}  // namespace treadle
