// Messages that are lost, doubled, cut or changed between stages: an error, never wrong
// activations, and an end.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/activation_link.h"
#include "tests/engine/link/link_pipeline.h"
#include "tests/support/faults/faulty_communicator.h"
#include "tests/support/ranks/ranks.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;

struct NamedFault {
  const char* name;
  Fault fault;
};
const NamedFault kFaults[] = {
    {"drop", {.kind = FaultKind::kDrop}},
    {"duplicate", {.kind = FaultKind::kDuplicate}},
    {"truncate", {.kind = FaultKind::kTruncate, .bytes = 5}},
    {"only a header", {.kind = FaultKind::kTruncate, .bytes = 4 * kHidden * 4}},
    {"zeros at the end", {.kind = FaultKind::kZeroTail, .bytes = 40}},
    {"all zeros", {.kind = FaultKind::kZeroTail, .bytes = 1 << 20}},
    {"a bit of the rows", {.kind = FaultKind::kCorrupt, .bit = 8 * 300 + 3}},
    {"a bit of the epoch", {.kind = FaultKind::kCorrupt, .bit = 8 * 9}},
    {"a bit of the checksum", {.kind = FaultKind::kCorrupt, .bit = 8 * 30}},
    {"a bit of the magic number", {.kind = FaultKind::kCorrupt, .bit = 2}},
};

Wrap FaultyStage(int faulty, const FaultScript& script) {
  return [=](int stage, CommunicatorPtr inner) -> CommunicatorPtr {
    if (stage != faulty) return inner;
    return std::make_unique<FaultyCommunicator>(std::move(inner), script);
  };
}

// View of the stage behind the faulty one: iterations before the fault, all right, then an error.
void ExpectErrorAfter(const Outcome& outcome, int fault_at, const std::string& name) {
  EXPECT_EQ(outcome.received, fault_at) << name;
  EXPECT_TRUE(outcome.right) << name;
  EXPECT_TRUE(absl::IsDataLoss(outcome.status) || absl::IsDeadlineExceeded(outcome.status) ||
              absl::IsInternal(outcome.status) || absl::IsUnavailable(outcome.status))
      << name << ": " << outcome.status;
}

TEST(ActivationLink, FaultsAreErrorsBetweenThreads) {
  for (const WireType wire : kWires) {
    for (const auto& [name, fault] : kFaults) {
      const PipelineCase test{wire, 1, std::vector<int64_t>(8, 4)};
      const int at =
          fault.kind == FaultKind::kDuplicate ? 4 : 3;  // the second copy is one too many
      const std::vector<Outcome> outcomes =
          RunThreads(3, test, kShort, FaultyStage(1, FaultAt(3, fault)));
      ExpectErrorAfter(outcomes[2], at, name);
      for (const Outcome& outcome : outcomes) EXPECT_TRUE(outcome.right) << name;
    }
  }
}

TEST(ActivationLink, FaultsAreErrorsBetweenProcesses) {
  for (const auto& [name, fault] : kFaults) {
    const RendezvousFolder folder;
    const PipelineCase test{WireType::kF32, 1, std::vector<int64_t>(8, 4)};
    const int at = fault.kind == FaultKind::kDuplicate ? 4 : 3;
    RankProcesses processes(2, [&, &name = name, &fault = fault](int stage) {
      CommunicatorPtr communicator = JoinGloo(stage, 2, folder, milliseconds(500));
      const Outcome outcome =
          RunStage(FaultyStage(0, FaultAt(3, fault))(stage, std::move(communicator)), test,
                   [&] { AttendAll(stage, 2, folder); });
      if (stage == 1) ExpectErrorAfter(outcome, at, name);
      return outcome.right && (stage == 0 || !outcome.status.ok());
    });
    for (int stage = 0; stage < 2; ++stage) EXPECT_EQ(processes.Wait(stage), 0) << name;
  }
}

TEST(ActivationLink, ADelayIsNoError) {
  const PipelineCase test = RandomCase(WireType::kF32, 1, 12, 3);
  const FaultScript script = [](int64_t, size_t) {
    return Fault{.kind = FaultKind::kDelay, .delay = milliseconds(3)};
  };
  ExpectAllReceived(RunThreads(3, test, kLong, FaultyStage(1, script)), test);
}

TEST(ActivationLink, NoRandomFaultGivesWrongActivations) {
  int met = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const PipelineCase test = RandomCase(kWires[seed % 3], static_cast<int>(seed % 4), 30, seed);
    const std::vector<Outcome> outcomes =
        RunThreads(3, test, milliseconds(60), FaultyStage(seed % 2, RandomFaults(seed, 0.02)));
    for (const Outcome& outcome : outcomes) {
      EXPECT_TRUE(outcome.right) << seed;
      met += outcome.status.ok() ? 0 : 1;
    }
  }
  EXPECT_GT(met, 30);  // or the faults were none
}

}  // namespace
}  // namespace treadle
