#include "kernels/collectives/thread_communicator.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {
namespace {

using Clock = std::chrono::steady_clock;

// How long a wait looks before it sleeps: longer than waking up takes, short enough that a rank
// whose peer lost its core soon gives its own away.
constexpr auto kSpin = std::chrono::microseconds(100);
// From then on it yields between looks: the peer may be waiting for this very core, where there are
// more ranks than cores, or where the machine's scheduler put both on one. Not at once, because who
// yields on a busy machine gets its core back milliseconds later.
constexpr auto kYield = std::chrono::microseconds(20);
constexpr int kLooksPerClock = 32;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The state that a rank shows the others.
struct alignas(64) Seat {
  // Counts its meetings; the buffer of meeting m lies in buffers[m % 2], which is written anew only
  // when all have been to meeting m + 1, and so have read it.
  std::atomic<uint32_t> meetings = 0;
  std::array<const void*, 2> buffers = {};

  // Where its thread sleeps.
  alignas(64) std::atomic<bool> sleeping = false;
  Mutex mu;
  CondVar wake;
};

class Group {
 public:
  Group(int size, std::chrono::milliseconds timeout)
      : size_(size), timeout_(timeout), seats_(size) {}

  int size() const { return size_; }
  Seat& seat(int rank) { return seats_[rank]; }

  absl::Status status() {
    if (!broken_.load(std::memory_order_acquire)) return absl::OkStatus();
    MutexLock lock(mu_);
    return status_;
  }

  // The first reason stays.
  void Break(absl::Status why) {
    MutexLock lock(mu_);
    if (!status_.ok()) return;
    status_ = std::move(why);
    broken_.store(true);
    for (int rank = 0; rank < size_; ++rank) Wake(rank);
  }

  // After a change that `rank` may be waiting for. The change and `sleeping` are both written and
  // then read in one total order, so that either the sleeper sees the change or it is woken.
  void Wake(int rank) {
    Seat& seat = seats_[rank];
    if (!seat.sleeping.load()) return;
    // With the lock, it is not between its last look and its sleep.
    { MutexLock lock(seat.mu); }
    seat.wake.NotifyOne();
  }

  // Returns when ready(), which reads what others change before they call Wake(rank). `what` is for
  // the error, and names what is waited for.
  template <typename Ready, typename What>
  absl::Status Wait(int rank, Ready ready, What what) {
    if (ready()) return absl::OkStatus();
    const Clock::time_point begin = Clock::now();
    for (auto waited = Clock::duration::zero(); waited < kSpin; waited = Clock::now() - begin) {
      for (int i = 0; i < kLooksPerClock; ++i) {
        if (ready()) return absl::OkStatus();
        Pause();
      }
      if (broken_.load(std::memory_order_relaxed)) return status();
      if (waited >= kYield) sched_yield();
    }
    Seat& seat = seats_[rank];
    bool in_time = true;
    {
      MutexLock lock(seat.mu);
      seat.sleeping.store(true);
      while (!ready() && !broken_.load() && in_time) {
        in_time = seat.wake.WaitUntil(seat.mu, begin + timeout_) || ready();
      }
      seat.sleeping.store(false, std::memory_order_relaxed);
    }
    if (ready()) return absl::OkStatus();
    if (!in_time) {
      Break(absl::DeadlineExceededError(
          Str("rank ", rank, " waited ", timeout_.count(), " ms ", what())));
    }
    return status();
  }

 private:
  // Constant.
  const int size_;
  const std::chrono::milliseconds timeout_;

  std::vector<Seat> seats_;  // [size]
  std::atomic<bool> broken_ = false;
  Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank), buffers_(group_->size()) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  bool asynchronous() const override { return false; }

  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override;
  absl::Status AllGather(const void* in, size_t bytes, void* out) override;
  absl::Status Broadcast(void* data, size_t bytes, int root) override;
  void Abort(absl::Status why) override;

 private:
  // Shows `buffer` to the others and waits for theirs, which are in buffers_ then.
  absl::Status Meet(std::string_view what, const void* buffer);

  const std::shared_ptr<Group> group_;
  const int rank_;

  // Confined to the rank's thread.
  uint32_t meeting_ = 0;
  std::vector<const void*> buffers_;  // [size], of this meeting
};

absl::Status ThreadCommunicator::Meet(std::string_view what, const void* buffer) {
  TREADLE_RETURN_IF_ERROR(group_->status());
  ++meeting_;
  Seat& seat = group_->seat(rank_);
  seat.buffers[meeting_ % 2] = buffer;
  seat.meetings.store(meeting_);
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_) group_->Wake(rank);
  }
  for (int rank = 0; rank < size(); ++rank) {
    const Seat& other = group_->seat(rank);
    const auto there = [&] {
      // It may be one meeting ahead, and no further.
      return static_cast<int32_t>(other.meetings.load() - meeting_) >= 0;
    };
    TREADLE_RETURN_IF_ERROR(
        group_->Wait(rank_, there, [&] { return Str("for rank ", rank, " in ", what); }));
    buffers_[rank] = other.buffers[meeting_ % 2];
  }
  return absl::OkStatus();
}

absl::Status ThreadCommunicator::AllReduce(const float* in, int64_t count, bool accumulate,
                                           float* out) {
  TREADLE_RETURN_IF_ERROR(Meet("AllReduce", in));
  // A block of sums at a time, so that a long vector is read from memory once.
  constexpr int64_t kBlock = 512;
  alignas(64) float sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    std::memcpy(sums, static_cast<const float*>(buffers_[0]) + begin, block * sizeof(float));
    for (int rank = 1; rank < size(); ++rank) {
      const float* part = static_cast<const float*>(buffers_[rank]) + begin;
      for (int64_t i = 0; i < block; ++i) sums[i] += part[i];
    }
    if (accumulate) {
      for (int64_t i = 0; i < block; ++i) out[begin + i] += sums[i];
    } else {
      std::memcpy(out + begin, sums, block * sizeof(float));
    }
  }
  return absl::OkStatus();
}

absl::Status ThreadCommunicator::AllGather(const void* in, size_t bytes, void* out) {
  TREADLE_RETURN_IF_ERROR(Meet("AllGather", in));
  auto* to = static_cast<std::byte*>(out);
  for (int rank = 0; rank < size() && bytes > 0; ++rank) {
    std::memcpy(to + rank * bytes, buffers_[rank], bytes);
  }
  return Meet("AllGather", nullptr);  // all have read it
}

absl::Status ThreadCommunicator::Broadcast(void* data, size_t bytes, int root) {
  TREADLE_CHECK(root >= 0 && root < size());
  TREADLE_RETURN_IF_ERROR(Meet("Broadcast", data));
  if (rank_ != root && bytes > 0) std::memcpy(data, buffers_[root], bytes);
  return Meet("Broadcast", nullptr);  // all have read it
}

void ThreadCommunicator::Abort(absl::Status why) {
  TREADLE_CHECK(!why.ok());
  group_->Break(std::move(why));
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> CreateThreadCommunicators(
    int size, std::chrono::milliseconds timeout) {
  TREADLE_CHECK(size >= 1);
  const auto group = std::make_shared<Group>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> communicators;
  for (int rank = 0; rank < size; ++rank) {
    communicators.push_back(std::make_unique<ThreadCommunicator>(group, rank));
  }
  return communicators;
}

}  // namespace treadle
