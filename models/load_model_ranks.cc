#include "models/load_model_ranks.h"

#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "models/shared_conversion.h"

namespace treadle {
namespace {

// What several ranks have loaded, as one fraction.
class SharedProgress {
 public:
  SharedProgress(size_t ranks, const std::function<void(double)>& report)
      : report_(report), fractions_(ranks) {}

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
  const std::function<void(double)>& report_;
  Mutex mutex_;
  std::vector<double> fractions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<Model>>> LoadModelRanks(
    const Checkpoint& checkpoint, std::span<Backend* const> backends, const LoadOptions& options) {
  const size_t size = backends.size();
  SharedConversion conversion(static_cast<int>(size));
  SharedProgress progress(size, options.progress);
  std::vector<std::unique_ptr<Model>> models(size);
  std::vector<absl::Status> statuses(size);
  const auto load_rank = [&](size_t rank) {
    LoadOptions load = options;
    load.shard = {static_cast<int>(rank), static_cast<int>(size)};
    load.progress = progress.OfRank(rank);
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
