// Thread communicators that have transfers, too: links between stages without sockets or devices.
// Whichever end of a transfer comes second copies. What breaks one rank's breaks the group's.
//
// Thread safety: as Communicator; the group lives as long as the last of them.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/collectives/thread_communicator.h"
#include "tests/support/ranks/forwarding_communicator.h"

namespace treadle {

class ThreadLink final : public ForwardingCommunicator {
 public:
  struct Part {
    const bool send;
    const int from, to;
    void* const data;
    const size_t bytes;
    bool done = false;
  };
  struct Group {
    explicit Group(std::chrono::milliseconds patience) : timeout(patience) {}

    const std::chrono::milliseconds timeout;  // of every wait
    Mutex mutex;
    CondVar changed;
    absl::Status status;
    std::deque<std::shared_ptr<Part>> alone;  // whose other end has not come
  };

  ThreadLink(std::unique_ptr<Communicator> below, std::shared_ptr<Group> group)
      : ForwardingCommunicator(std::move(below)), group_(std::move(group)) {}

  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override {
    return Begin({true, rank(), to, const_cast<void*>(data), bytes});
  }
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override {
    return Begin({false, from, rank(), data, bytes});
  }
  absl::Status Wait(Transfer transfer) override {
    const auto node = pending_.extract(transfer);
    TREADLE_CHECK(!node.empty());
    const Part& part = *node.mapped();
    const auto deadline = std::chrono::steady_clock::now() + group_->timeout;
    {
      const MutexLock lock(group_->mutex);
      bool in_time = true;
      while (!part.done && group_->status.ok() && in_time) {
        in_time = group_->changed.WaitUntil(group_->mutex, deadline);
      }
      if (part.done || !group_->status.ok()) return group_->status;
    }
    Abort(absl::DeadlineExceededError(Str("rank ", rank(), " waited ", group_->timeout.count(),
                                          " ms for a transfer from rank ", part.from, " to rank ",
                                          part.to)));
    const MutexLock lock(group_->mutex);
    return group_->status;
  }
  void Abort(absl::Status why) override {
    {
      const MutexLock lock(group_->mutex);
      if (group_->status.ok()) group_->status = why;
      group_->changed.NotifyAll();
    }
    ForwardingCommunicator::Abort(std::move(why));
  }

 private:
  absl::StatusOr<Transfer> Begin(Part begun) {
    const auto part = std::make_shared<Part>(begun);
    absl::Status why;
    {
      const MutexLock lock(group_->mutex);
      if (!group_->status.ok()) return group_->status;
      auto& alone = group_->alone;
      auto other = alone.begin();
      while (other != alone.end() && ((*other)->from != part->from || (*other)->to != part->to ||
                                      (*other)->send == part->send)) {
        ++other;
      }
      if (other == alone.end()) {
        alone.push_back(part);
      } else {
        const Part& sent = part->send ? *part : **other;
        const Part& wanted = part->send ? **other : *part;
        if (sent.bytes != wanted.bytes) {
          why = Internal("rank ", sent.from, " sent ", sent.bytes, " bytes to rank ", sent.to,
                         ", which expected ", wanted.bytes);
        } else {
          if (sent.bytes > 0) std::memcpy(wanted.data, sent.data, sent.bytes);
          part->done = (*other)->done = true;
        }
        alone.erase(other);
        group_->changed.NotifyAll();
      }
    }
    if (!why.ok()) Abort(why);
    pending_.emplace(next_, part);
    return next_++;
  }

  const std::shared_ptr<Group> group_;
  Transfer next_ = 1;
  std::map<Transfer, std::shared_ptr<Part>> pending_;
};

// One per rank, in rank order.
inline std::vector<std::unique_ptr<Communicator>> CreateThreadLinks(
    int size, std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<ThreadLink::Group>(timeout);
  std::vector<std::unique_ptr<Communicator>> links;
  for (auto& communicator : CreateThreadCommunicators(size, timeout)) {
    links.push_back(std::make_unique<ThreadLink>(std::move(communicator), group));
  }
  return links;
}

}  // namespace treadle
