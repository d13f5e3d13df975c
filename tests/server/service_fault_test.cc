// Cancellation, deadlines, overload, drain and slow readers (the service's rows of the fault
// table): accepted = finished + ended with an explicit error, nothing follows an error, all pages
// come back, and the next request succeeds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "server/grpc/rpc_details.pb.h"
#include "tests/server/test_server.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// Streams that run in threads of their own, for servers whose engine is held.
class Clients {
 public:
  explicit Clients(TestServer& server) : server_(server) {}
  ~Clients() { Join(); }

  void Add(v1::GenerateRequest request, std::chrono::milliseconds timeout = {}) {
    auto client = std::make_unique<Client>();
    client->request = std::move(request);
    if (timeout.count() > 0) {
      client->context.set_deadline(std::chrono::system_clock::now() + timeout);
    }
    client->thread = std::thread([&server = server_, c = client.get()] {
      const auto reader = server.stub().GenerateStream(&c->context, c->request);
      c->outcome = ReadAll(*reader);
    });
    clients_.push_back(std::move(client));
  }
  void Cancel(size_t i) { clients_[i]->context.TryCancel(); }
  void Join() {
    for (auto& client : clients_) {
      if (client->thread.joinable()) client->thread.join();
    }
  }
  const StreamOutcome& outcome(size_t i) const { return clients_[i]->outcome; }
  size_t size() const { return clients_.size(); }

 private:
  struct Client {
    v1::GenerateRequest request;
    grpc::ClientContext context;
    StreamOutcome outcome;
    std::thread thread;
  };
  TestServer& server_;
  std::vector<std::unique_ptr<Client>> clients_;
};

void ExpectAllBackAndServing(TestServer& server) {
  v1::GenerateResponse response;
  const grpc::Status status = Generate(server, MakeRequest("next", 4, 5, 6), response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.output().token_ids_size(), 6);
  EXPECT_TRUE(server.WaitLoad([](const v1::GetLoadResponse& load) {
    return load.running() == 0 && load.waiting() == 0 &&
           load.kv_pages_free() == load.kv_pages_total();
  }));
}

TestServerOptions OneAtATime() {
  TestServerOptions options;
  options.scheduling.max_batch_size = 1;
  return options;
}

TEST(ServiceFaults, CancelWhileRunningFreesItsSlots) {
  TestServer server;
  server.gate().Allow(5);  // the end cannot come first
  grpc::ClientContext context;
  const auto reader = server.stub().GenerateStream(&context, MakeRequest("long", 1, 10, 900));
  v1::GenerateResponse first;
  ASSERT_TRUE(reader->Read(&first));
  context.TryCancel();
  while (reader->Read(&first)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  server.gate().Open();
  const auto end = server.EndOf("long");
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, "cancelled");
  EXPECT_LT(end->output_tokens, 900);
  ExpectAllBackAndServing(server);
}

TEST(ServiceFaults, CancelWhileQueuedNeverRuns) {
  TestServer server(OneAtATime());
  server.gate().Close();
  Clients clients(server);
  clients.Add(MakeRequest("runs", 1, 10, 5));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
  clients.Add(MakeRequest("queued", 2, 10, 5));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.waiting() == 1; }));
  clients.Cancel(1);
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.waiting() == 0; }));
  server.gate().Open();
  clients.Join();
  EXPECT_TRUE(clients.outcome(0).status.ok());
  EXPECT_EQ(clients.outcome(1).status.error_code(), grpc::StatusCode::CANCELLED);
  const auto end = server.EndOf("queued");
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, "cancelled");
  EXPECT_EQ(end->output_tokens, 0);
  ExpectAllBackAndServing(server);
}

TEST(ServiceFaults, UnaryCancelFreesItsSlots) {
  TestServer server;
  server.gate().Close();
  grpc::ClientContext context;
  grpc::Status status;
  std::thread client([&] {
    v1::GenerateResponse response;
    status = server.stub().Generate(&context, MakeRequest("unary", 1, 10, 500), &response);
  });
  EXPECT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
  context.TryCancel();
  client.join();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  server.gate().Open();
  EXPECT_EQ(server.EndOf("unary")->reason, "cancelled");
  ExpectAllBackAndServing(server);
}

TEST(ServiceFaults, DeadlineWhileRunningAndWhileQueued) {
  TestServer server(OneAtATime());
  server.gate().Close();
  Clients clients(server);
  clients.Add(MakeRequest("runs", 1, 10, 500), std::chrono::milliseconds(2000));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
  clients.Add(MakeRequest("queued", 2, 10, 5), std::chrono::milliseconds(1000));
  clients.Join();
  server.gate().Open();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(clients.outcome(i).status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_EQ(clients.outcome(i).messages, 0);
  }
  // Not only the clients' own timers: the server itself ended them for that reason.
  for (const char* id : {"runs", "queued"}) {
    const auto end = server.EndOf(id);
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->reason, "deadline") << id;
  }
  EXPECT_EQ(server.EndOf("queued")->output_tokens, 0);
  ExpectAllBackAndServing(server);
}

TEST(ServiceFaults, AFullQueueIsRefusedAtOnceWithRetryInfo) {
  TestServerOptions options = OneAtATime();
  options.scheduling.max_queue = 2;
  TestServer server(options);
  server.gate().Close();
  Clients clients(server);
  clients.Add(MakeRequest("0", 1, 10, 5));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
  clients.Add(MakeRequest("1", 2, 10, 5));
  clients.Add(MakeRequest("2", 3, 10, 5));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.waiting() == 2; }));

  for (int i = 0; i < 20; ++i) {
    v1::GenerateResponse response;
    const grpc::Status status = Generate(server, MakeRequest("refused", 4, 10, 5), response);
    ASSERT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    rpc::Status details;
    ASSERT_TRUE(details.ParseFromString(status.error_details()));
    EXPECT_EQ(details.code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    ASSERT_EQ(details.details_size(), 1);
    EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.RetryInfo");
    rpc::RetryInfo retry;
    ASSERT_TRUE(retry.ParseFromString(details.details(0).value()));
    EXPECT_GE(retry.retry_delay().seconds(), 1);
  }
  server.gate().Open();
  clients.Join();
  for (size_t i = 0; i < clients.size(); ++i) EXPECT_TRUE(clients.outcome(i).status.ok());
  ExpectAllBackAndServing(server);
}

TEST(ServiceFaults, DrainFinishesEverythingAccepted) {
  TestServer server;
  server.gate().Close();
  Clients clients(server);
  for (int i = 0; i < 12; ++i) clients.Add(MakeRequest(std::to_string(i), i, 10 + i, 10 + i));
  ASSERT_TRUE(
      server.WaitLoad([](const auto& load) { return load.running() + load.waiting() == 12; }));
  bool drained = false;
  std::thread drain([&] { drained = server.server().DrainAndStop(std::chrono::seconds(60)); });
  EXPECT_TRUE(server.WaitLoad([](const auto& load) { return load.draining(); }));

  v1::GenerateResponse response;
  const grpc::Status late = Generate(server, MakeRequest("late", 1, 5, 5), response);
  EXPECT_EQ(late.error_code(), grpc::StatusCode::UNAVAILABLE);
  std::string health;
  ASSERT_TRUE(RawCall(server, "/grpc.health.v1.Health/Check", "", health).ok());
  EXPECT_EQ(health, std::string("\x08\x02", 2));  // NOT_SERVING

  server.gate().Open();
  drain.join();
  clients.Join();
  EXPECT_TRUE(drained);
  for (size_t i = 0; i < clients.size(); ++i) {
    EXPECT_TRUE(clients.outcome(i).status.ok()) << clients.outcome(i).status.error_message();
    EXPECT_EQ(clients.outcome(i).all.output().token_ids_size(), 10 + static_cast<int>(i));
  }
}

TEST(ServiceFaults, WhatRemainsAtTheDrainLimitEndsUnavailable) {
  TestServer server(OneAtATime());
  server.gate().Close();
  Clients clients(server);
  clients.Add(MakeRequest("runs", 1, 10, 500));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
  clients.Add(MakeRequest("queued", 2, 10, 5));
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.waiting() == 1; }));
  EXPECT_FALSE(server.server().DrainAndStop(std::chrono::milliseconds(50)));
  clients.Join();
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(clients.outcome(i).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  }
}

TEST(ServiceFaults, ASlowReaderBlocksNobodyAndIsCancelled) {
  TestServerOptions options;
  options.stall_timeout = std::chrono::milliseconds(300);
  options.max_context = 16384;
  options.kv_pages = 4096;
  TestServer server(options);
  // About 250 bytes per token: far more than the connection's window takes.
  v1::GenerateRequest heavy = MakeRequest("slow", 1, 4, 15000);
  heavy.mutable_response()->set_logprobs(20);
  grpc::ClientContext context;
  const auto slow = server.stub().GenerateStream(&context, heavy);
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));

  for (int i = 0; i < 5; ++i) {
    v1::GenerateResponse response;
    ASSERT_TRUE(Generate(server, MakeRequest("other", i, 10, 20), response).ok());
    EXPECT_EQ(response.output().token_ids_size(), 20);
  }
  // Enough tokens for a write to stall, and no chance to finish.
  ASSERT_TRUE(server.WaitLoad([&](const auto& load) {
    return load.running() == 0 || server.stack().ledger().end() > 2000;
  }));
  server.gate().Close();
  ASSERT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 0; }));
  server.gate().Open();
  const auto end = server.EndOf("slow");
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->reason, "cancelled");
  EXPECT_LT(end->output_tokens, 15000);
  v1::GenerateResponse message;
  while (slow->Read(&message)) {
  }
  EXPECT_EQ(slow->Finish().error_code(), grpc::StatusCode::CANCELLED);
  ExpectAllBackAndServing(server);
}

TEST(ServiceFaults, ClientsThatComeAndGoLeaveNothingBehind) {
  TestServer server;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&server, t] {
      for (int i = 0; i < 15; ++i) {
        grpc::ClientContext context;
        const auto request = MakeRequest("x", 10 * t + i, 1 + (7 * i) % 40, 200);
        const auto reader = server.stub().GenerateStream(&context, request);
        v1::GenerateResponse message;
        for (int reads = 0; reads < i % 4 && reader->Read(&message); ++reads) {
        }
        context.TryCancel();
        reader->Finish();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectAllBackAndServing(server);
}

}  // namespace
}  // namespace treadle
