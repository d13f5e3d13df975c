#include "tests/support/faults/faulty_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/status.h"
#include "kernels/op_cases/random.h"

namespace treadle {

FaultScript FaultAt(int64_t index, Fault fault) {
  return [=](int64_t at, size_t) { return at == index ? fault : Fault{}; };
}

FaultScript RandomFaults(uint64_t seed, double rate) {
  auto random = std::make_shared<Random>(seed);
  return [random, rate](int64_t, size_t bytes) {
    static constexpr FaultKind kKinds[] = {FaultKind::kDelay,     FaultKind::kDrop,
                                           FaultKind::kDuplicate, FaultKind::kTruncate,
                                           FaultKind::kZeroTail,  FaultKind::kCorrupt};
    Fault fault{.delay = std::chrono::milliseconds(random->Below(20)),
                .bytes = static_cast<size_t>(1 + random->Below(std::max<int64_t>(bytes, 1))),
                .bit = static_cast<size_t>(random->Below(int64_t{1} << 40))};
    for (const FaultKind kind : kKinds) {
      if (random->Uniform() < rate && fault.kind == FaultKind::kNone) fault.kind = kind;
    }
    return fault;
  };
}

FaultyCommunicator::FaultyCommunicator(std::unique_ptr<Communicator> below, FaultScript script)
    : ForwardingCommunicator(std::move(below)), script_(std::move(script)) {}

Communicator::Transfer FaultyCommunicator::Remember(std::optional<Transfer> below) {
  transfers_.emplace(next_, below);
  return next_++;
}

std::vector<std::byte>& FaultyCommunicator::Copy(const void* data, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(data);
  return copies_.emplace_back(begin, begin + bytes);
}

absl::StatusOr<Communicator::Transfer> FaultyCommunicator::Send(const void* data, size_t bytes,
                                                                int to) {
  const Fault fault = script_(sends_++, bytes);
  if (fault.kind != FaultKind::kNone) ++faults_;
  switch (fault.kind) {
    case FaultKind::kNone:
      break;
    case FaultKind::kDelay:
      std::this_thread::sleep_for(fault.delay);
      break;
    case FaultKind::kDrop:
      return Remember(std::nullopt);
    case FaultKind::kDuplicate:
      TREADLE_RETURN_IF_ERROR(below().Send(Copy(data, bytes).data(), bytes, to).status());
      break;
    case FaultKind::kTruncate:
      bytes -= std::min(fault.bytes, bytes);
      break;
    case FaultKind::kZeroTail: {
      std::vector<std::byte>& copy = Copy(data, bytes);
      std::fill_n(copy.end() - std::min(fault.bytes, bytes), std::min(fault.bytes, bytes),
                  std::byte{0});
      data = copy.data();
      break;
    }
    case FaultKind::kCorrupt:
      if (bytes > 0) {
        std::vector<std::byte>& copy = Copy(data, bytes);
        copy[fault.bit / 8 % bytes] ^= std::byte{1} << fault.bit % 8;
        data = copy.data();
      }
      break;
  }
  TREADLE_ASSIGN_OR_RETURN(const Transfer transfer, below().Send(data, bytes, to));
  return Remember(transfer);
}

absl::StatusOr<Communicator::Transfer> FaultyCommunicator::Recv(void* data, size_t bytes,
                                                                int from) {
  TREADLE_ASSIGN_OR_RETURN(const Transfer transfer, below().Recv(data, bytes, from));
  return Remember(transfer);
}

absl::Status FaultyCommunicator::Wait(Transfer transfer) {
  const auto node = transfers_.extract(transfer);
  TREADLE_CHECK(!node.empty());
  return node.mapped() ? below().Wait(*node.mapped()) : absl::OkStatus();
}

}  // namespace treadle
