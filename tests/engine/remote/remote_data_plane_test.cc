// Activations that are lost, late, doubled, cut short or changed between two workers.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/remote/worker/worker_epoch.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/faulty_communicator.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

constexpr std::chrono::milliseconds kDeadline{kInstrumented ? 4000 : 1000};

class DataPlaneFault : public testing::TestWithParam<FaultKind> {};

TEST_P(DataPlaneFault, EndsTheEpochInTimeOrDoesNoHarm) {
  ClusterOptions options;
  options.model = *WriteTinyLlamaGguf(OwnFolder().path(), {});
  options.stages = 2;
  options.engine.iteration_deadline = options.engine.silence = kDeadline;
  // The first stage's messages of the first epoch meet the fault.
  options.worker.pipeline =
      [](const PipelineRequest& request,
         Rendezvous& rendezvous) -> absl::StatusOr<std::unique_ptr<Communicator>> {
    auto inner = GlooPipeline("lo")(request, rendezvous);
    if (!inner.ok() || request.epoch != 1 || request.rank != 0) return inner;
    Fault fault;
    fault.kind = GetParam();
    fault.delay = 2 * kDeadline;
    fault.bytes = 100;
    fault.bit = 12345;
    return std::make_unique<FaultyCommunicator>(*std::move(inner), FaultAt(4, fault));
  };
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
  EngineClient client(std::move(cluster.engine));
  const auto requests = SomeRequests(6, 2);
  ASSERT_OK_AND_ASSIGN(auto local, MakeLocalEngine(options.model, 1));
  PlanDriver expected(DriverOptions(3), requests);
  ASSERT_EQ(EngineClient(std::move(local)).Run(expected), absl::OkStatus());

  PlanDriver driver(DriverOptions(4, 2), requests);
  const absl::Status first = client.Run(driver);
  EXPECT_FALSE(first.ok());
  EXPECT_THAT(first.message(), testing::HasSubstr("stage "));
  for (uint32_t attempt = 0; attempt < 5; ++attempt) {
    ASSERT_EQ(client.Recover(), absl::OkStatus());
    PlanDriver again(DriverOptions(5 + attempt, 2), requests);
    if (!client.Run(again).ok()) continue;
    EXPECT_EQ(DifferentAnswers(expected, again, requests), "");
    return;
  }
  ADD_FAILURE() << "no epoch ran through: " << client.engine().status();
}

INSTANTIATE_TEST_SUITE_P(Messages, DataPlaneFault,
                         testing::Values(FaultKind::kDelay, FaultKind::kDrop, FaultKind::kDuplicate,
                                         FaultKind::kZeroTail, FaultKind::kCorrupt));

}  // namespace
}  // namespace treadle
