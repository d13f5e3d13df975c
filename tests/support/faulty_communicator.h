// A communicator that mistreats what is sent through it: messages are delayed, dropped, duplicated,
// truncated or changed, as a script says. Collectives and receives pass.
//
// Thread safety: as Communicator.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "kernels/collectives/communicator.h"

namespace treadle {

enum class FaultKind {
  kNone,
  kDelay,      // by Fault::delay, in the call of Send
  kDrop,       // never sent, though Wait says so
  kDuplicate,  // sent twice
  kTruncate,   // the last `bytes` are not sent
  kZeroTail,   // the last `bytes` are zero
  kCorrupt,    // bit `bit` is the other one
};

struct Fault {
  FaultKind kind = FaultKind::kNone;
  std::chrono::milliseconds delay{0};
  size_t bytes = 1;
  size_t bit = 0;  // modulo the message's bits
};

// What befalls message `index` (0, 1, ... in the order of the calls of Send) of so many bytes.
using FaultScript = std::function<Fault(int64_t index, size_t bytes)>;

// One fault at one message.
FaultScript FaultAt(int64_t index, Fault fault);
// Each message meets each kind with probability `rate`; equal for equal seeds.
FaultScript RandomFaults(uint64_t seed, double rate);

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, FaultScript script);

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  absl::Status AllReduce(const float* in, int64_t count, bool accumulate, float* out) override {
    return inner_->AllReduce(in, count, accumulate, out);
  }
  absl::Status AllGather(const void* in, size_t bytes, void* out) override {
    return inner_->AllGather(in, bytes, out);
  }
  absl::Status Broadcast(void* data, size_t bytes, int root) override {
    return inner_->Broadcast(data, bytes, root);
  }
  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override;
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override;
  absl::Status Wait(Transfer transfer) override;
  void Abort(absl::Status why) override { inner_->Abort(std::move(why)); }

  int64_t faults() const { return faults_; }  // met so far

 private:
  Transfer Remember(std::optional<Transfer> inner);
  std::vector<std::byte>& Copy(const void* data, size_t bytes);

  const FaultScript script_;
  std::deque<std::vector<std::byte>> copies_;  // what `inner_` still sends from
  const std::unique_ptr<Communicator> inner_;
  int64_t sends_ = 0;
  int64_t faults_ = 0;
  Transfer next_ = 1;
  std::unordered_map<Transfer, std::optional<Transfer>> transfers_;  // none: nothing to wait for
};

}  // namespace treadle
