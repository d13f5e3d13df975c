// Faults of the control plane, message by message: each ends in a clear error in time, or does no
// harm, and afterwards the next epoch answers as if nothing had been.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/op_cases/instrumented.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/fault_proxy.h"
#include "tests/support/ranks/remote_cluster.h"

namespace treadle {
namespace {

using ::testing::HasSubstr;
using Kind = MessageFault::Kind;
using Where = MessageFault::Where;

constexpr std::chrono::milliseconds kDeadline{kInstrumented ? 4000 : 1000};

struct FaultCase {
  const char* name;
  int stage;  // whose worker is behind the proxy, of 0 and 1
  MessageFault fault;
  const char* error;  // part of it; null: may do no harm
};

void PrintTo(const FaultCase& fault_case, std::ostream* out) { *out << fault_case.name; }

class RemoteFault : public testing::TestWithParam<FaultCase> {
 protected:
  void SetUp() override {
    TinyModelOptions tiny;
    options_.model = *WriteTinyLlamaGguf(OwnFolder().path(), tiny);
    options_.stages = 2;
    options_.engine.iteration_deadline = kDeadline;
    options_.engine.silence = kDeadline;
    options_.reach = [this](int stage, const std::string& address) {
      if (stage != proxied_) return address;
      proxy_ = *FaultProxy::Start(address);
      for (const MessageFault& fault : at_creation_) proxy_->Inject(fault);
      return proxy_->address();
    };
  }

  // Runs requests; with an error, again in the next epochs until they have run through, with the
  // right answers. The first error.
  absl::Status RunUntilRight(EngineClient& client) {
    const auto requests = SomeRequests(6, 1);
    absl::Status first_error;
    auto local = MakeLocalEngine(options_.model, 1);
    if (!local.ok()) return local.status();
    PlanDriver expected(DriverOptions(1), requests);
    EXPECT_EQ(EngineClient(*std::move(local)).Run(expected), absl::OkStatus());
    for (uint32_t attempt = 0; attempt < 5; ++attempt) {
      PlanDriver driver(DriverOptions(2 + attempt, 2), requests);
      const absl::Status ran = client.Run(driver);
      if (ran.ok()) {
        EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
        return first_error;
      }
      if (first_error.ok()) first_error = ran;
      EXPECT_EQ(client.Recover(), absl::OkStatus());
    }
    ADD_FAILURE() << "no epoch ran through";
    return first_error;
  }

  int proxied_ = 0;
  std::vector<MessageFault> at_creation_;
  std::unique_ptr<FaultProxy> proxy_;
  ClusterOptions options_;
};

TEST_P(RemoteFault, WhileServing) {
  proxied_ = GetParam().stage;
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options_));
  EngineClient client(std::move(cluster.engine));
  proxy_->Inject(GetParam().fault);
  if (GetParam().fault.message == "heartbeat") {  // comes when it comes
    EXPECT_FALSE(client.WaitForError().ok());
    EXPECT_EQ(client.Recover(), absl::OkStatus());
  }
  const absl::Status error = RunUntilRight(client);
  EXPECT_EQ(proxy_->happened(), 1);
  if (GetParam().error == nullptr) return;
  EXPECT_FALSE(error.ok());
  EXPECT_THAT(error.message(), HasSubstr(GetParam().error));
}

const FaultCase kServing[] = {
    {"PlanToFirstDropped", 0, {Kind::kDrop, Where::kToWorker, "plan", 3}, "stage 0"},
    {"PlanToFirstDelayed",
     0,
     {Kind::kDelay, Where::kToWorker, "plan", 3, 2 * kDeadline},
     "stage 0"},
    {"PlanToFirstALittleLate",
     0,
     {Kind::kDelay, Where::kToWorker, "plan", 3, kDeadline / 20},
     nullptr},
    {"PlanToFirstDoubled",
     0,
     {Kind::kDuplicate, Where::kToWorker, "plan", 3},
     "plan of iteration 3"},
    {"PlanToFirstSwapped", 0, {Kind::kReorder, Where::kToWorker, "plan", 3}, "plan of iteration 4"},
    {"PlanToFirstTruncated", 0, {Kind::kTruncate, Where::kToWorker, "plan", 3}, "stage "},
    {"PlanToFirstCut", 0, {Kind::kCut, Where::kToWorker, "plan", 3}, "stage 0"},
    {"PlanToSecondDropped", 1, {Kind::kDrop, Where::kToWorker, "plan", 3}, "stage 1"},
    {"PlanToSecondDelayed",
     1,
     {Kind::kDelay, Where::kToWorker, "plan", 3, 2 * kDeadline},
     "stage 1"},
    {"PlanToSecondDoubled",
     1,
     {Kind::kDuplicate, Where::kToWorker, "plan", 3},
     "plan of iteration 3"},
    {"PlanToSecondSwapped",
     1,
     {Kind::kReorder, Where::kToWorker, "plan", 3},
     "plan of iteration 4"},
    {"PlanToSecondTruncated", 1, {Kind::kTruncate, Where::kToWorker, "plan", 3}, "stage 1"},
    {"PlanToSecondCut", 1, {Kind::kCut, Where::kToWorker, "plan", 3}, "stage 1"},
    {"ResultDropped", 1, {Kind::kDrop, Where::kFromWorker, "result", 3}, "stage 1"},
    {"ResultDelayed", 1, {Kind::kDelay, Where::kFromWorker, "result", 3, 2 * kDeadline}, "stage 1"},
    {"ResultDoubled", 1, {Kind::kDuplicate, Where::kFromWorker, "result", 3}, "iteration 3"},
    {"ResultSwapped", 1, {Kind::kReorder, Where::kFromWorker, "result", 3}, "iteration 4"},
    {"ResultTruncated", 1, {Kind::kTruncate, Where::kFromWorker, "result", 3}, "stage 1"},
    {"ResultCut", 1, {Kind::kCut, Where::kFromWorker, "result", 3}, "stage 1"},
    {"HeartbeatCut", 1, {Kind::kCut, Where::kFromWorker, "heartbeat", 0}, nullptr},
};
INSTANTIATE_TEST_SUITE_P(Messages, RemoteFault, testing::ValuesIn(kServing),
                         [](const auto& info) { return std::string(info.param.name); });

// While an epoch is being formed.
class RemoteFaultAtRestart : public RemoteFault {};

TEST_P(RemoteFaultAtRestart, EndsInTimeAndTheNextRestartRecovers) {
  proxied_ = GetParam().stage;
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options_));
  EngineClient client(std::move(cluster.engine));
  proxy_->Inject(GetParam().fault);
  client.engine().Restart();
  const absl::Status formed = client.WaitForRoom();
  EXPECT_FALSE(formed.ok());
  EXPECT_THAT(formed.message(), HasSubstr("stage "));
  EXPECT_EQ(client.Recover(), absl::OkStatus());
  RunUntilRight(client).IgnoreError();
}

const FaultCase kForming[] = {
    {"BeginDropped", 1, {Kind::kDrop, Where::kToWorker, "begin_epoch", 0}, ""},
    {"BeginCut", 1, {Kind::kCut, Where::kToWorker, "begin_epoch", 0}, ""},
    {"ReadyDropped", 1, {Kind::kDrop, Where::kFromWorker, "epoch_ready", 0}, ""},
    {"RendezvousDropped", 1, {Kind::kDrop, Where::kFromWorker, "rendezvous", 0}, ""},
    {"RelayDropped", 1, {Kind::kDrop, Where::kToWorker, "rendezvous", 0}, ""},
    {"FollowHelloDropped", 1, {Kind::kDrop, Where::kToWorker, "hello", 0}, ""},
    {"FollowAnswerDropped", 1, {Kind::kDrop, Where::kFromWorker, "answer", 0}, ""},
};
INSTANTIATE_TEST_SUITE_P(Messages, RemoteFaultAtRestart, testing::ValuesIn(kForming),
                         [](const auto& info) { return std::string(info.param.name); });

// While workers are greeted and load.
class RemoteFaultAtCreation : public RemoteFault {};

TEST_P(RemoteFaultAtCreation, EndsInTime) {
  proxied_ = GetParam().stage;
  at_creation_ = {GetParam().fault};
  options_.engine.weights_from_master = GetParam().fault.message == "tensor";
  auto cluster = StartThreadCluster(options_);
  EXPECT_EQ(proxy_->happened(), 1);
  if (GetParam().error == nullptr && cluster.ok()) {
    EngineClient client(std::move(cluster->engine));
    RunUntilRight(client).IgnoreError();
    return;
  }
  EXPECT_FALSE(cluster.ok());
  EXPECT_THAT(cluster.status().message(), HasSubstr("stage 1"));
}

const FaultCase kLoading[] = {
    {"HelloDropped", 1, {Kind::kDrop, Where::kFromWorker, "hello", 0}, ""},
    {"ConfigureDropped", 1, {Kind::kDrop, Where::kToWorker, "configure", 0}, ""},
    {"ConfigureCut", 1, {Kind::kCut, Where::kToWorker, "configure", 0}, ""},
    {"LoadedDropped", 1, {Kind::kDrop, Where::kFromWorker, "loaded", 0}, ""},
    {"ReserveDropped", 1, {Kind::kDrop, Where::kToWorker, "reserve", 0}, ""},
    {"ReservedDropped", 1, {Kind::kDrop, Where::kFromWorker, "reserved", 0}, ""},
    {"TensorDropped", 1, {Kind::kDrop, Where::kToWorker, "tensor", 2}, ""},
    {"TensorDoubled", 1, {Kind::kDuplicate, Where::kToWorker, "tensor", 0}, nullptr},
    {"TensorTruncated", 1, {Kind::kTruncate, Where::kToWorker, "tensor", 2}, ""},
    {"TensorCut", 1, {Kind::kCut, Where::kToWorker, "tensor", 2}, ""},
    {"RequestDropped", 1, {Kind::kDrop, Where::kFromWorker, "tensor", 2}, ""},
};
INSTANTIATE_TEST_SUITE_P(Messages, RemoteFaultAtCreation, testing::ValuesIn(kLoading),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace treadle
