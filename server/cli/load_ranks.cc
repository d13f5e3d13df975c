#include "server/cli/load_ranks.h"

#include <algorithm>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/cpu/thread_pool.h"
#include "models/model.h"

namespace treadle {
namespace {

// What several ranks have loaded, as one fraction.
class SharedProgress {
 public:
  SharedProgress(size_t ranks, std::function<void(double)> report)
      : report_(std::move(report)), fractions_(ranks) {}

  std::function<void(double)> OfRank(size_t rank) {
    if (!report_) return {};
    return [this, rank](double fraction) {
      MutexLock lock(mutex_);
      fractions_[rank] = fraction;
      double sum = 0;
      for (const double part : fractions_) sum += part;
      report_(sum / static_cast<double>(fractions_.size()));
    };
  }

 private:
  const std::function<void(double)> report_;
  Mutex mutex_;
  std::vector<double> fractions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

LoadOptions LoadOptionsFrom(const ServeOptions& options, int64_t max_context) {
  LoadOptions load;
  load.shard.size = static_cast<int>(options.tensor_parallel);
  load.max_batch_tokens = options.max_batch_tokens;
  load.max_context = max_context;
  load.weights = options.weights;
  load.outlier_threshold = options.outlier_threshold;
  load.outlier_rule =
      options.outlier_rule == "per-call" ? OutlierRule::kPerCall : OutlierRule::kPerRow;
  return load;
}

DType KvTypeOf(const ServeOptions& options) {
  if (options.kv_dtype == "bf16") return DType::kBF16;
  return options.kv_dtype == "f32" ? DType::kF32 : DType::kF16;
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
  SharedProgress shared(ranks.size(), std::move(progress));
  std::vector<absl::Status> loaded(ranks.size());
  const auto load_rank = [&](size_t rank) {
    LoadOptions load = LoadOptionsFrom(options, max_context);
    load.shard.rank = static_cast<int>(rank);
    load.threads = ThreadsOfRank(options, options.tensor_parallel);
    load.progress = shared.OfRank(rank);
    auto model = Model::Load(checkpoint, *ranks[rank].backend, load);
    loaded[rank] = model.status();
    if (model.ok()) ranks[rank].model = *std::move(model);
  };
  if (ranks.size() == 1) {
    load_rank(0);
  } else {
    std::vector<std::thread> threads;
    try {
      for (size_t rank = 0; rank < ranks.size(); ++rank) threads.emplace_back(load_rank, rank);
    } catch (const std::system_error& error) {
      loaded.push_back(ResourceExhausted("loading thread: ", error.what()));
    }
    for (std::thread& thread : threads) thread.join();
  }
  for (const absl::Status& status : loaded) TREADLE_RETURN_IF_ERROR(status);
  return ranks;
}

}  // namespace treadle
