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

#include "tests/support/ranks/forwarding_communicator.h"

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

// The fault of message `index` (0, 1, ... in the order of the calls of Send) of so many bytes.
using FaultScript = std::function<Fault(int64_t index, size_t bytes)>;

// One fault at one message.
FaultScript FaultAt(int64_t index, Fault fault);
// Each message meets each kind with probability `rate`; equal for equal seeds.
FaultScript RandomFaults(uint64_t seed, double rate);

class FaultyCommunicator final : public ForwardingCommunicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> below, FaultScript script);
  ~FaultyCommunicator() override { EndBelow(); }

  absl::StatusOr<Transfer> Send(const void* data, size_t bytes, int to) override;
  absl::StatusOr<Transfer> Recv(void* data, size_t bytes, int from) override;
  absl::Status Wait(Transfer transfer) override;

  int64_t faults() const { return faults_; }  // met so far

 private:
  Transfer Remember(std::optional<Transfer> below);
  std::vector<std::byte>& Copy(const void* data, size_t bytes);

  const FaultScript script_;
  std::deque<std::vector<std::byte>> copies_;  // what the one below still sends from
  int64_t sends_ = 0;
  int64_t faults_ = 0;
  Transfer next_ = 1;
  std::unordered_map<Transfer, std::optional<Transfer>> transfers_;  // none: nothing to wait for
};

}  // namespace treadle
