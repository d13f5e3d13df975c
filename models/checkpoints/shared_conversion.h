// Converts weights, by several threads, and once for all ranks.
//
// One conversion for all ranks that load in this process. Under tensor parallelism every rank needs
// its cut of the same converted matrix: the first that comes converts it, and it goes when the last
// one has cut its part. So each matrix is converted once, and beside what is packed there is never
// more than one of them.
//
// Ranks convert the same matrices in the same order, each on a thread of its own.
//
// Thread safety: all methods are thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "kernels/formats/quantize.h"

namespace treadle {

// Splits work over threads that live for one call: for loading and converting, which are rare. 0:
// one thread per CPU of this process. Its result may be called from any thread.
ParallelFor SplitOverThreads(int threads);

class SharedConversion {
 public:
  explicit SharedConversion(int ranks) : next_(static_cast<size_t>(ranks)) {}

  int ranks() const { return static_cast<int>(next_.size()); }

  using Make = std::function<absl::StatusOr<QuantizedMatrix>()>;
  // Rank `rank`'s next matrix: `make` makes it on the thread of whoever comes first, and each rank
  // hands it to its `use`. Errors: those of both; Cancelled if another rank has left.
  absl::Status Use(int rank, const Make& make,
                   const std::function<absl::Status(const QuantizedMatrix&)>& use)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // A rank will not come again, because it has failed: nobody is to wait for it.
  void Leave() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<int64_t> next_ ABSL_GUARDED_BY(mutex_);  // each rank's next turn
  int64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;           // the matrix at hand is of
  bool making_ ABSL_GUARDED_BY(mutex_) = false;        // somebody makes it, or has made it
  std::optional<absl::StatusOr<QuantizedMatrix>> made_ ABSL_GUARDED_BY(mutex_);
  int used_ ABSL_GUARDED_BY(mutex_) = 0;  // ranks that are done with it
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace treadle
