// A pipeline of links under test, and what must come out of it.
//
// Every pipeline here computes the same: the first stage makes rows that only (iteration, row,
// column) determine, each stage transforms them, and every stage compares what it receives, bit for
// bit, with what that must be.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/activation_link.h"
#include "tests/support/ranks/ranks.h"

namespace treadle {

using CommunicatorPtr = std::unique_ptr<Communicator>;

inline constexpr WireType kWires[] = {WireType::kF32, WireType::kBf16, WireType::kInt8};
// A wait that must not be needed, and one that must end.
inline constexpr std::chrono::milliseconds kLong{600'000};
inline constexpr std::chrono::milliseconds kShort{200};
inline constexpr uint64_t kEpoch = 7;
inline constexpr int64_t kHidden = 100;  // not a whole number of blocks
inline constexpr int64_t kMaxRows = 9;

struct PipelineCase {
  WireType wire = WireType::kF32;
  int ahead = 1;  // iterations announced before they are received; 0: none
  std::vector<int64_t> rows;
};
// Some iterations have no rows: their plans touch no data plane.
PipelineCase RandomCase(WireType wire, int ahead, int iterations, uint64_t seed);

struct Outcome {
  absl::Status status;
  int received = 0;   // iterations
  bool right = true;  // all of them
};

ActivationLink::Options LinkOptions(int stage, int stages, WireType wire);

// Runs the case as stage communicator->rank(). A stage that fails breaks the others, as StageRanks
// does. The communicator and the link live until `finish` returns.
Outcome RunStage(CommunicatorPtr communicator, const PipelineCase& test,
                 const std::function<void()>& finish);

using Wrap = std::function<CommunicatorPtr(int stage, CommunicatorPtr)>;
// All stages as threads, each with what `wrap` makes of its communicator.
std::vector<Outcome> RunThreads(int stages, const PipelineCase& test,
                                std::chrono::milliseconds timeout, const Wrap& wrap);
void ExpectAllReceived(const std::vector<Outcome>& outcomes, const PipelineCase& test);

// For stages that are processes.
CommunicatorPtr JoinGloo(int stage, int stages, const RendezvousFolder& folder,
                         std::chrono::milliseconds timeout);
// Until all stages are here: who goes takes what it still sends along.
void AttendAll(int stage, int stages, const RendezvousFolder& folder);

}  // namespace treadle
