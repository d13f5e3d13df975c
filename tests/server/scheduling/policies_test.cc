// Clients' and keys' words on order reach the policy: the order in which a server that runs one
// request at a time answers those that wait.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "server/access/api_keys.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/http_client.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using testing::ElementsAre;

class PolicyOrder : public testing::Test {
 protected:
  void Serve(const std::string& policy) {
    TestServerOptions options;
    options.scheduling.policy = policy;
    options.scheduling.max_batch_size = 1;
    options.gate_closed = true;
    options.adjust = [this](ServiceOptions& service) { service.keys = keys_.get(); };
    server_ = std::make_unique<TestServer>(options);
  }
  // Asks, and waits until it is accepted, so that the order of arrivals is known.
  void Ask(const std::string& id, int32_t priority, const std::string& key = "") {
    clients_.emplace_back([=, this] {
      v1::GenerateRequest request = MakeRequest(id, 1, 4, 4);
      request.set_priority(priority);
      grpc::ClientContext context;
      if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
      v1::GenerateResponse response;
      const grpc::Status status = server_->stub().Generate(&context, request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
    });
    AwaitArrival();
  }
  void AskOverHttp(const std::string& id, int32_t priority) {
    const std::string body =
        Str(R"({"prompt": [1, 2, 3, 4], "max_tokens": 4, "priority": )", priority, "}");
    http_.emplace_back(server_->http_port());
    http_.back().Send(Str("POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: ", id,
                          "\r\nContent-Type: application/json\r\nContent-Length: ", body.size(),
                          "\r\n\r\n", body));
    AwaitArrival();
  }
  std::vector<std::string> Order() {
    server_->gate().Open();
    for (std::thread& client : clients_) client.join();
    clients_.clear();
    for (HttpClient& client : http_) {
      EXPECT_THAT(client.ReadAnswer(), testing::StartsWith("HTTP/1.1 200"));
    }
    std::vector<std::string> order;
    for (uint64_t next = 0, lost = 0; order.size() < asked_;) {
      server_->stack().ledger().WaitFor(next, Clock::now() + std::chrono::hours(1));
      for (const auto& record : server_->stack().ledger().Read(next, 100, lost)) {
        for (const LedgerEnd& end : record->ends) order.push_back(end.client_id);
      }
    }
    return order;
  }

  std::unique_ptr<ApiKeys> keys_;
  std::unique_ptr<TestServer> server_;

 private:
  void AwaitArrival() {
    ++asked_;
    const auto count = [this] {
      const PoolLoad load = server_->stack().pool().Load();
      return static_cast<size_t>(load.waiting + load.running);
    };
    while (count() < asked_) std::this_thread::yield();
    // The first one runs before others can be preferred to it.
    while (server_->stack().pool().Load().running == 0) std::this_thread::yield();
  }

  size_t asked_ = 0;
  std::vector<std::thread> clients_;
  std::deque<HttpClient> http_;
};

TEST_F(PolicyOrder, PriorityIsTheRequests) {
  Serve("priority");
  Ask("runs", 9);
  Ask("late", 5);
  Ask("default", 0);
  Ask("early", -3);
  AskOverHttp("first", -4);
  AskOverHttp("last", 6);
  EXPECT_THAT(Order(), ElementsAre("runs", "first", "early", "default", "late", "last"));
}

TEST_F(PolicyOrder, IsThatOfArrivalsUnlessAskedFor) {
  Serve("fcfs");
  Ask("a", 5);
  AskOverHttp("b", 4);
  Ask("c", 3);
  EXPECT_THAT(Order(), ElementsAre("a", "b", "c"));
}

TEST_F(PolicyOrder, SharesAreTheKeys) {
  const std::string alice(16, 'a'), bob(16, 'b'), path = TestPath("shares.keys");
  WriteText(path, alice + " alice\n" + bob + " bob - - weight=3\n");
  ASSERT_OK_AND_ASSIGN(auto keys, ApiKeys::Open(path, [](const LogEvent&) {}));
  keys_ = std::move(keys);
  Serve("fair-share");
  for (const char* const id : {"a1", "a2", "a3", "a4"}) Ask(id, 0, alice);
  for (const char* const id : {"b1", "b2", "b3", "b4"}) Ask(id, 0, bob);
  std::vector<std::string> order = Order();
  order.resize(4);
  EXPECT_THAT(order, ElementsAre("a1", "b1", "b2", "b3"));
}

}  // namespace
}  // namespace treadle
