#include "models/checkpoints/shared_conversion.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace treadle {
namespace {

int CpusOfThisProcess() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

}  // namespace

ParallelFor SplitOverThreads(int threads) {
  if (threads <= 0) threads = CpusOfThisProcess();
  return [threads](int64_t count, const std::function<void(int64_t, int64_t)>& body) {
    const int64_t pieces = std::min<int64_t>(threads, count);
    if (pieces <= 1) {
      if (count > 0) body(0, count);
      return;
    }
    std::vector<std::jthread> others;  // joined when it goes
    for (int64_t i = 1; i < pieces; ++i) {
      others.emplace_back(
          [&body, i, count, pieces] { body(i * count / pieces, (i + 1) * count / pieces); });
    }
    body(0, count / pieces);
  };
}

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
