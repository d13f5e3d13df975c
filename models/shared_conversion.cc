#include "models/shared_conversion.h"

#include <utility>

namespace treadle {

absl::Status SharedConversion::Use(int rank, const Make& make,
                                   const std::function<absl::Status(const QuantizedMatrix&)>& use) {
  const absl::Status left = absl::CancelledError("another rank could not load");
  bool mine = false;
  {
    MutexLock lock(mutex_);
    const int64_t turn = next_[static_cast<size_t>(rank)]++;
    while (!left_ && turn_ != turn) changed_.Wait(mutex_);
    if (left_) return left;
    mine = !std::exchange(making_, true);
  }
  if (mine) {
    absl::StatusOr<QuantizedMatrix> made = make();
    MutexLock lock(mutex_);
    made_ = std::move(made);
    changed_.NotifyAll();
  }
  const absl::StatusOr<QuantizedMatrix>* matrix = nullptr;  // stays until all have used it
  {
    MutexLock lock(mutex_);
    while (!left_ && !made_) changed_.Wait(mutex_);
    if (!made_) return left;
    matrix = &*made_;
  }
  const absl::Status status = matrix->ok() ? use(**matrix) : matrix->status();
  MutexLock lock(mutex_);
  if (++used_ == std::ssize(next_)) {
    made_.reset();
    making_ = false;
    used_ = 0;
    ++turn_;
    changed_.NotifyAll();
  }
  return status;
}

void SharedConversion::Leave() {
  MutexLock lock(mutex_);
  left_ = true;
  changed_.NotifyAll();
}

}  // namespace treadle
