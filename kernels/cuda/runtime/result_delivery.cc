#include "kernels/cuda/runtime/result_delivery.h"

#include <algorithm>
#include <cstring>

#include "base/status.h"

namespace treadle::cuda {
namespace {

constexpr size_t kAlignment = 16;

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

absl::Status ResultDelivery::Reserve(size_t bytes) {
  bytes = AlignUp(bytes);
  if (bytes <= on_device_.bytes()) return absl::OkStatus();
  TREADLE_CHECK(!device_.capturing());
  TREADLE_RETURN_IF_ERROR(Flush());
  TREADLE_RETURN_IF_ERROR(device_.Synchronize());
  DeliverAll();
  TREADLE_ASSIGN_OR_RETURN(on_device_, device_.Allocate(bytes));
  for (Copy& copy : copies_) {
    TREADLE_ASSIGN_OR_RETURN(copy.pinned, device_.AllocateHost(bytes));
  }
  ++generation_;
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> ResultDelivery::Take(size_t bytes, void* host, int64_t announced_row) {
  if (pending_.taken + bytes > on_device_.bytes()) {
    TREADLE_CHECK(!device_.capturing());
    TREADLE_RETURN_IF_ERROR(Flush());
    TREADLE_RETURN_IF_ERROR(Reserve(bytes));
  }
  const size_t offset = pending_.taken;
  pending_.expected.push_back({offset, bytes, host, announced_row});
  pending_.taken = AlignUp(offset + bytes);
  return on_device_.data() + offset;
}

absl::Status ResultDelivery::Flush() {
  if (pending_.expected.empty()) return absl::OkStatus();
  TREADLE_CHECK(!device_.capturing());
  if (flushed_ - delivered_ == kCopies) {  // nobody waited for the marks
    TREADLE_RETURN_IF_ERROR(device_.Synchronize());
    DeliverAll();
  }
  Copy& copy = copies_[flushed_ % kCopies];
  copy.expected.swap(pending_.expected);
  pending_.expected.clear();
  const Expected& last = copy.expected.back();
  device_.CopyToHostAsync(copy.pinned.data(), on_device_.data(), last.offset + last.bytes);
  pending_.taken = 0;
  ++flushed_;
  return absl::OkStatus();
}

absl::Status ResultDelivery::SetMark(int mark) {
  TREADLE_CHECK(mark >= 0 && mark < kMarks);
  TREADLE_RETURN_IF_ERROR(Flush());
  flushed_at_mark_[mark] = flushed_;
  return absl::OkStatus();
}

void ResultDelivery::DeliverAll() { DeliverUpTo(flushed_); }

void ResultDelivery::DeliverMarked(int mark) {
  TREADLE_CHECK(mark >= 0 && mark < kMarks);
  DeliverUpTo(flushed_at_mark_[mark]);
}

void ResultDelivery::DeliverUpTo(int64_t end) {
  for (; delivered_ < end; ++delivered_) {
    Copy& copy = copies_[delivered_ % kCopies];
    for (const Expected& results : copy.expected) {
      std::memcpy(results.host, copy.pinned.data() + results.offset, results.bytes);
    }
    copy.expected.clear();
  }
}

void ResultDelivery::Drop() {
  pending_ = {};
  for (Copy& copy : copies_) copy.expected.clear();
  delivered_ = flushed_;
}

void ResultDelivery::AddPending(const Pending& pending, std::span<SampleResult> results) {
  TREADLE_CHECK(pending_.expected.empty());
  pending_.taken = pending.taken;
  for (Expected expected : pending.expected) {
    if (expected.announced_row >= 0 && !results.empty()) {
      const size_t rows = expected.bytes / sizeof(SampleResult);
      expected.host = results.subspan(expected.announced_row, rows).data();
    }
    pending_.expected.push_back(expected);
  }
}

}  // namespace treadle::cuda
