// A server of three stages, eight clients, and a fault every few seconds; after each, the
// invariant: what was answered is right, what was begun is a beginning of the right answer, what
// failed was told why, pages are free when nobody asks, no process is left over, and the next
// request succeeds.
//
// TREADLE_SOAK_SECONDS: how long; TREADLE_SOAK_SEED: of all that is random.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "kernels/op_cases/instrumented.h"
#include "tests/attacks/attacked_server.h"
#include "tests/attacks/hostile_client.h"
#include "tests/server/cli/served_binary.h"
#include "tests/server/http/http_client.h"
#include "tests/soak/memory_slope.h"
#include "tests/soak/soak_clients.h"
#include "tests/support/faults/process_losses.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

constexpr size_t kStages = 3;
constexpr std::chrono::seconds kBetweenFaults{5};
// Bytes that one request may leave behind; fewer samples say nothing of it.
constexpr double kLeakBytes = 1024;
constexpr size_t kLeakSamples = 30;

int64_t FromEnvironment(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// Whether it holds within a minute.
bool Soon(const std::function<bool()>& holds) {
  for (int i = 0; i < 600 && !holds(); ++i) std::this_thread::sleep_for(milliseconds(100));
  return holds();
}

class Soak : public testing::Test {
 protected:
  using Kind = ByteFault::Kind;
  struct Fault {
    const char* name;
    std::function<void()> happen;
  };

  void SetUp() override {
    const std::string& model = OwnModel(SlowModel());  // not among the sockets
    setenv("TMPDIR", folder_.Folder("sockets").c_str(), /*overwrite=*/1);
    server_ = std::make_unique<AttackedServer>(
        std::vector<std::string>{"--pipeline-parallel", Str(kStages), "--max-batch-tokens", "48"},
        AttackedServer::Limits{}, model);
    ASSERT_FALSE(HasFailure());
  }

  std::vector<int> Workers() const { return ChildrenOf(server_->process().pid()); }
  int AnyWorker() {
    const std::vector<int> workers = Workers();
    return workers.empty() ? -1 : workers[random_() % workers.size()];
  }
  void LoseWorkers(int count) {
    for (int i = 0; i < count; ++i) {
      const ProcessLoss& loss = kProcessLosses[random_() % std::size(kProcessLosses)];
      if (const int worker = AnyWorker(); worker > 0) loss.happen(worker);
    }
  }
  // While an epoch forms, and the next one.
  void LoseSuccessors(int count) {
    for (int i = 0; i < count; ++i) {
      LoseWorkers(1);
      std::this_thread::sleep_for(milliseconds(random_() % 1000));
    }
  }
  void PutToSleep() {
    const int worker = AnyWorker();
    if (worker < 0) return;
    kill(worker, SIGSTOP);
    std::this_thread::sleep_for(milliseconds(random_() % 3000));
    const std::vector<int> workers = Workers();
    if (std::ranges::count(workers, worker) > 0) kill(worker, SIGCONT);
  }
  void DisturbBytes(Kind kind) {
    for (ByteProxy* proxy : {&clients_->grpc_proxy(), &clients_->http_proxy()}) {
      proxy->Inject(
          {.kind = kind,
           .where = random_() % 2 == 0 ? ByteFault::Where::kToServer : ByteFault::Where::kToClient,
           .skip = static_cast<int64_t>(random_() % 20'000),
           .delay = milliseconds(random_() % 3000)});
    }
  }
  void CutClientsOff() {
    clients_->grpc_proxy().CutAll();
    clients_->http_proxy().CutAll();
  }
  void SendMalformed();
  void AfterFault(const std::string& fault);
  void ExpectEnd();

  const int64_t seconds_ = FromEnvironment("TREADLE_SOAK_SECONDS", 15);
  const uint64_t seed_ = static_cast<uint64_t>(FromEnvironment("TREADLE_SOAK_SEED", 1));
  std::mt19937_64 random_{seed_};
  const TestFolder folder_;
  std::unique_ptr<AttackedServer> server_;
  std::unique_ptr<SoakClients> clients_;  // behind the server: it goes first
  MemorySlope memory_;
};

// Requests that are none; each is refused by a word, or its connection ends.
void Soak::SendMalformed() {
  const auto stub = v1::Inference::NewStub(server_->Connect());
  std::vector<v1::GenerateRequest> requests(4, RequestOfKind(0));
  requests[0].mutable_token_ids()->add_ids(-1);
  requests[1].mutable_token_ids()->clear_ids();
  requests[2].mutable_sampling()->set_temperature(NAN);
  requests[3].mutable_stopping()->set_max_new_tokens(-5);
  for (const v1::GenerateRequest& request : requests) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    v1::GenerateResponse response;
    const grpc::Status status = stub->Generate(&context, request, &response);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  }
  for (const char* body : {"{", R"({"prompt":"x","temperature":"hot"})", "\xff\xfe"}) {
    HttpClient client(server_->http_port());
    client.Send(Str("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: ",
                    std::string(body).size(), "\r\n\r\n", body));
    EXPECT_THAT(client.ReadAnswer(), HasSubstr(" 400 ")) << body;
  }
  for (const int port : {server_->port(), server_->http_port()}) {
    HostileClient client(port, 1);
    std::string noise(2000, '\0');
    for (char& byte : noise) byte = static_cast<char>(random_());
    if (random_() % 2 == 0) client.Greet();
    client.Send(noise);
  }
}

// Everybody rests; what must hold then.
void Soak::AfterFault(const std::string& fault) {
  SCOPED_TRACE("after: " + fault);
  EXPECT_TRUE(clients_->Rest()) << "a client waits for its answer";
  ASSERT_TRUE(server_->alive()) << server_->process().output();
  EXPECT_EQ(clients_->AskOnce(), "");
  const auto stub = v1::Inference::NewStub(server_->Connect());
  v1::GetLoadResponse load;
  EXPECT_TRUE(Soon([&] {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    return stub->GetLoad(&context, {}, &load).ok() && load.waiting() == 0 && load.running() == 0 &&
           load.kv_pages_free() == load.kv_pages_total();
  })) << load.ShortDebugString();
  EXPECT_TRUE(Soon([&] { return Workers().size() == kStages; })) << Workers().size();
  EXPECT_TRUE(Soon([&] { return ChildrenOf(server_->process().pid(), /*dead=*/true).empty(); }));
  memory_.Add(static_cast<double>(clients_->counts().all()),
              static_cast<double>(server_->memory_bytes()));
  clients_->GoOn();
}

void Soak::ExpectEnd() {
  const std::vector<int> workers = Workers();
  EXPECT_EQ(server_->process().Stop(), 0) << server_->process().output();
  for (const int worker : workers) {
    EXPECT_TRUE(Soon([&] { return kill(worker, 0) != 0; })) << worker;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "sockets"));
}

TEST_F(Soak, EveryFaultLeavesTheInvariant) {
  std::printf("soak: %ld s, seed %lu\n", seconds_, seed_);
  clients_ = std::make_unique<SoakClients>(*server_, seed_);
  const int64_t descriptors = server_->descriptors();
  const Fault faults[] = {
      {"a worker is lost", [&] { LoseWorkers(1); }},
      {"two workers are lost", [&] { LoseWorkers(2); }},
      {"a worker and its successors are lost", [&] { LoseSuccessors(3); }},
      {"a worker sleeps for a while", [&] { PutToSleep(); }},
      {"every client is cut off", [&] { CutClientsOff(); }},
      {"a connection ends", [&] { DisturbBytes(Kind::kClose); }},
      {"a connection ends in the middle of a message", [&] { DisturbBytes(Kind::kTruncate); }},
      {"a connection ends in one direction", [&] { DisturbBytes(Kind::kHalfClose); }},
      {"nobody reads for a while", [&] { DisturbBytes(Kind::kDelay); }},
      {"malformed requests", [&] { SendMalformed(); }},
  };
  std::map<std::string, int> happened;
  clients_->Begin();
  const auto end = Clock::now() + std::chrono::seconds(seconds_);
  while (Clock::now() < end && !HasFailure()) {
    const Fault& fault = faults[random_() % std::size(faults)];
    const milliseconds before(random_() % milliseconds(kBetweenFaults).count());
    std::this_thread::sleep_for(before);
    fault.happen();
    std::this_thread::sleep_for(kBetweenFaults - before);
    std::printf("%ld s to go: %s\n",
                std::chrono::round<std::chrono::seconds>(end - Clock::now()).count(), fault.name);
    std::fflush(stdout);
    AfterFault(fault.name);
    ++happened[fault.name];
  }
  EXPECT_TRUE(clients_->Rest());
  // The clients' connections of gRPC stay, each with a pair of sockets behind the door.
  EXPECT_TRUE(server_->WaitDescriptors(descriptors + 3 * SoakClients::kEach + 3))
      << server_->descriptors() << " of " << descriptors;
  const SoakClients::Counts& counts = clients_->counts();
  for (const auto& [fault, times] : happened) std::printf("%6d x %s\n", times, fault.c_str());
  std::printf("answers: %ld right, %ld given up, %ld at their deadlines, %ld cut off by proxies\n",
              counts.right.load(), counts.given_up.load(), counts.too_late.load(),
              counts.cut_off.load());
  EXPECT_GT(counts.right, 0);
  const MemorySlope::Fit grown = memory_.Fitted();
  std::printf("the server's memory: %.0f +- %.0f bytes per request, of %zu samples; %ld MiB now\n",
              grown.slope, grown.error, memory_.size(), server_->memory_mb());
  if (!kInstrumented && memory_.size() >= kLeakSamples) {
    EXPECT_LT(grown.slope - 2 * grown.error, kLeakBytes);
  }
  clients_.reset();
  ExpectEnd();
}

}  // namespace
}  // namespace treadle
