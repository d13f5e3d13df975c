// Results of Sample on their way from the device to the caller.
//
//   Take        a place on the device that the kernel writes
//   Expect      says to which host memory that place goes
//   Flush       one asynchronous copy of all that is expected, into page-locked memory
//   SetMark     flushes, and notes what is complete once the mark is passed
//   Deliver...  after a wait: from page-locked memory to the callers'
// Flushed results have memory of their own, so a caller may wait for an iteration's while the next
// one writes its places on the device. In a graph there are only Take and Expect; what they noted
// is taken out after the capture and put back at each replay.
//
// Thread safety: belongs to its device's thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kernels/buffer.h"
#include "kernels/cuda/runtime/device.h"
#include "kernels/sampling.h"

namespace treadle::cuda {

class ResultDelivery {
 public:
  static constexpr int kMarks = 2;

  // Results that are one op's.
  struct Expected {
    size_t offset = 0;  // on the device
    size_t bytes = 0;
    void* host = nullptr;
    int64_t announced_row = -1;  // of the batch's samples; -1: no part of them
  };
  // The results that were taken since the last flush.
  struct Pending {
    std::vector<Expected> expected;
    size_t taken = 0;
  };

  explicit ResultDelivery(Device& device) : device_(device) {}

  // So that a Take of this much, or several that make it, need no growth. Not while a graph is
  // captured. Waits and delivers if it grows.
  absl::Status Reserve(size_t bytes);
  // Results of `bytes` for `host`. Flushes or grows if there is no room; in a capture there must
  // be.
  absl::StatusOr<std::byte*> Take(size_t bytes, void* host, int64_t announced_row);
  absl::Status Flush();
  absl::Status SetMark(int mark);

  // After the device was synchronized.
  void DeliverAll();
  // After the device passed the mark.
  void DeliverMarked(int mark);
  // After a failure: results are worthless.
  void Drop();

  // In a graph: between the two, everything was flushed.
  Pending TakePending() { return std::exchange(pending_, {}); }
  // `results`, if given: where announced rows' results go now.
  void AddPending(const Pending& pending, std::span<SampleResult> results);

  // Changes whenever device addresses do.
  int64_t generation() const { return generation_; }

 private:
  // A copy under way; the last kCopies of them have memory.
  struct Copy {
    Buffer pinned;
    std::vector<Expected> expected;
  };
  static constexpr int64_t kCopies = kMarks + 1;

  void DeliverUpTo(int64_t end);

  Device& device_;
  Buffer on_device_;
  Pending pending_;
  std::array<Copy, kCopies> copies_;
  // Copies are counted: copy i is copies_[i % kCopies].
  int64_t flushed_ = 0;
  int64_t delivered_ = 0;
  std::array<int64_t, kMarks> flushed_at_mark_ = {};
  int64_t generation_ = 0;
};

}  // namespace treadle::cuda
