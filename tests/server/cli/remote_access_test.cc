// A worker's probes, and mutual TLS between master and workers, also where bytes suffer on their
// way; with workers in this process.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <future>

#include "base/status.h"
#include "server/cli/daemon.h"
#include "tests/engine/remote/driven_requests.h"
#include "tests/server/access/test_certificates.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/byte_proxy.h"
#include "tests/support/in_time.h"
#include "tests/support/ranks/remote_cluster.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using testing::HasSubstr;

ClusterOptions TinyCluster() {
  const std::string folder = TestPath("model");
  std::filesystem::create_directories(folder);
  TinyModelOptions model;
  model.layers = 2;
  const auto path = WriteTinyLlamaGguf(folder, model);
  EXPECT_TRUE(path.ok()) << path.status();
  ClusterOptions options;
  options.model = *path;
  options.stages = 2;
  return options;
}

// Answer of grpc.health.v1 there: "1" serving, "2" not, or the status' code.
std::string Ask(const std::string& address, const std::string& name) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::Slice slice(
      name.empty() ? "" : std::string("\x0A") + static_cast<char>(name.size()) + name);
  grpc::ByteBuffer in(&slice, 1);
  grpc::ByteBuffer out;
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &in, &out,
                 [&](grpc::Status status) { done.set_value(std::move(status)); });
  const grpc::Status status = done.get_future().get();
  std::vector<grpc::Slice> slices;
  if (!status.ok() || !out.Dump(&slices).ok() || slices.empty()) {
    return Str("code ", static_cast<int>(status.error_code()));
  }
  return Str(static_cast<int>(slices[0].begin()[1]));
}

bool WaitFor(const std::string& address, const std::string& name, const std::string& answer) {
  return ComesTrue([&] { return Ask(address, name) == answer; });
}

TEST(RemoteAccess, AWorkerIsReadyWhileAnEpochStands) {
  ClusterOptions options = TinyCluster();
  options.worker.model_path = options.model;
  std::vector<std::unique_ptr<Worker>> workers;
  std::vector<std::string> addresses;
  for (int i = 0; i < options.stages; ++i) {
    ASSERT_OK_AND_ASSIGN(auto worker, Worker::Start(options.worker));
    addresses.push_back(worker->address());
    workers.push_back(std::move(worker));
    EXPECT_EQ(Ask(addresses.back(), ""), "1");
    EXPECT_EQ(Ask(addresses.back(), "ready"), "2");
    EXPECT_EQ(Ask(addresses.back(), "other"), "code 5");  // NOT_FOUND
  }
  {
    ASSERT_OK_AND_ASSIGN(auto engine, EngineOptionsFor(options, addresses));
    const auto remote = RemoteEngine::Create(std::move(engine));
    ASSERT_TRUE(remote.ok()) << remote.status();
    for (const std::string& address : addresses) EXPECT_TRUE(WaitFor(address, "ready", "1"));
  }
  for (const std::string& address : addresses) {
    EXPECT_TRUE(WaitFor(address, "ready", "2"));
    EXPECT_EQ(Ask(address, ""), "1");
  }
}

ControlCredentials Credentials(const std::string& name, const TestCa& ca, const PemPair& own) {
  const std::string folder = TestPath(name);
  std::filesystem::create_directories(folder);
  WriteText(folder + "/tls.crt", own.certificate);
  WriteText(folder + "/tls.key", own.key);
  WriteText(folder + "/ca.crt", ca.pem());
  auto credentials = OpenControlCredentials(folder, "", [](const LogEvent&) {});
  EXPECT_TRUE(credentials.ok()) << credentials.status();
  return *std::move(credentials);
}

TEST(RemoteAccess, MasterAndWorkersKnowEachOther) {
  const TestCa ca, other;
  ClusterOptions options = TinyCluster();
  options.worker.listen = "127.0.0.1:0";  // what the certificates are for
  options.engine.connect_deadline = std::chrono::seconds(20);
  options.worker.credentials = Credentials("worker", ca, ca.Sign());
  options.engine.credentials = Credentials("master", ca, ca.Sign());
  EXPECT_TRUE(StartThreadCluster(options).ok());

  options.engine.connect_deadline = std::chrono::seconds(1);
  options.engine.credentials = {};
  EXPECT_FALSE(StartThreadCluster(options).ok());
  options.engine.credentials = Credentials("stranger", ca, other.Sign());  // nobody knows it
  EXPECT_FALSE(StartThreadCluster(options).ok());
  options.engine.credentials = Credentials("wary", other, ca.Sign());  // it knows nobody
  EXPECT_FALSE(StartThreadCluster(options).ok());
}

// Bytes of the control plane that suffer on their way, under TLS: an epoch ends in time or nothing
// happens, and the answers are those of one process.
class ControlBytes : public testing::TestWithParam<std::tuple<ByteFault::Kind, ByteFault::Where>> {
};

TEST_P(ControlBytes, EndAnEpochOrDoNoHarm) {
  const auto [kind, where] = GetParam();
  const TestCa ca;
  ClusterOptions options = TinyCluster();
  options.worker.listen = "127.0.0.1:0";
  options.worker.credentials = Credentials("worker", ca, ca.Sign());
  options.engine.credentials = Credentials("master", ca, ca.Sign());
  options.engine.iteration_deadline = options.engine.silence =
      std::chrono::milliseconds(kInstrumented ? 4000 : 1000);
  std::unique_ptr<ByteProxy> proxy;  // before the second stage
  options.reach = [&](int stage, const std::string& address) {
    if (stage == 0) return address;
    proxy = std::make_unique<ByteProxy>(std::stoi(address.substr(address.rfind(':') + 1)));
    return Str("127.0.0.1:", proxy->port());
  };
  const auto requests = SomeRequests(6, 1);
  ASSERT_OK_AND_ASSIGN(auto local, MakeLocalEngine(options.model, 1));
  PlanDriver expected(DriverOptions(1), requests);
  ASSERT_EQ(EngineClient(std::move(local)).Run(expected), absl::OkStatus());
  ASSERT_OK_AND_ASSIGN(auto cluster, StartThreadCluster(options));
  EngineClient client(std::move(cluster.engine));
  bool used = false;  // the epoch, whose plans are numbered from its beginning on
  for (const int64_t skip : {0, 3000}) {
    const int before = proxy->happened();  // a heartbeat may meet the fault at once
    proxy->Inject(
        {.kind = kind, .where = where, .skip = skip, .delay = 2 * options.engine.silence});
    absl::Status ran = absl::UnknownError("not yet");
    for (uint32_t attempt = 0; attempt < 20 && (!ran.ok() || proxy->happened() == before);
         ++attempt) {
      if (std::exchange(used, true)) {
        EXPECT_EQ(client.Recover(), absl::OkStatus());
      }
      PlanDriver driver(DriverOptions(2 + attempt, 2), requests);
      ran = client.Run(driver);
      if (ran.ok()) {
        EXPECT_EQ(DifferentAnswers(expected, driver, requests), "");
      } else {
        EXPECT_THAT(ran.message(), HasSubstr("stage "));
      }
    }
    EXPECT_EQ(ran, absl::OkStatus());
    EXPECT_EQ(proxy->happened(), before + 1);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ControlBytes,
    testing::Combine(testing::Values(ByteFault::Kind::kClose, ByteFault::Kind::kTruncate,
                                     ByteFault::Kind::kHalfClose, ByteFault::Kind::kDelay,
                                     ByteFault::Kind::kDrop, ByteFault::Kind::kDuplicate,
                                     ByteFault::Kind::kFlip),
                     testing::Values(ByteFault::Where::kToServer, ByteFault::Where::kToClient)));

}  // namespace
}  // namespace treadle
