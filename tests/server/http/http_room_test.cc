// Clients that make room on a server that is full: never one whose request is whole, whether the
// server has read it or not, and others in an order that no flood turns against honest ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/sync.h"
#include "server/http/http_server.h"
#include "tests/server/http/http_client.h"

namespace treadle {
namespace {

using testing::EndsWith;

const char kRequest[] = "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody";
constexpr size_t kRequestBytes = sizeof kRequest - 1;

// "/echo" answers with the body; "/stop" keeps the server's own thread until Go.
class Server {
 public:
  explicit Server(size_t connections) {
    const auto echo = [](const HttpRequest& request, const auto& reply) {
      reply->Send({.body = request.body});
    };
    const auto stop = [this](const HttpRequest&, const auto& reply) {
      MutexLock lock(mutex_);
      stopped_ = true;
      changed_.NotifyAll();
      while (stopped_) changed_.Wait(mutex_);
      reply->Send({.body = "gone on"});
    };
    server_ = *HttpServer::Start(
        "127.0.0.1:0", {.connections = connections, .head_patience = std::chrono::hours(1)},
        {{"POST", "/echo", echo}, {"GET", "/stop", stop}});
  }
  int port() const { return server_->address().port; }
  std::unique_ptr<HttpClient> Connect(const std::string& words = "") const {
    auto client = std::make_unique<HttpClient>(port());
    client->Send(words);
    return client;
  }
  // Returns a client of "/stop" once the server does nothing else.
  std::unique_ptr<HttpClient> Stop() {
    auto client = Connect("GET /stop HTTP/1.1\r\nHost: localhost\r\n\r\n");
    MutexLock lock(mutex_);
    while (!stopped_) changed_.Wait(mutex_);
    return client;
  }
  void Go() {
    MutexLock lock(mutex_);
    stopped_ = false;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<HttpServer> server_;
};

TEST(HttpRoom, ARequestThatWaitsInTheSocketIsAnswered) {
  for (const bool they_close : {false, true}) {
    Server server(/*connections=*/8);
    const auto stopped = server.Stop();
    std::vector<std::unique_ptr<HttpClient>> silent;
    const auto crowd = [&] {
      for (int i = 0; i < 40; ++i) {
        silent.push_back(server.Connect());
        if (they_close) silent.back()->Close();
      }
    };
    crowd();
    const auto honest = server.Connect(kRequest);
    crowd();
    server.Go();
    EXPECT_THAT(honest->ReadAnswer(), EndsWith("\r\n\r\nbody"));
    EXPECT_THAT(stopped->ReadAnswer(), EndsWith("gone on"));
  }
}

TEST(HttpRoom, SilentClientsMakeRoomBeforeThoseThatHaveBegunToAsk) {
  for (size_t said = 1; said < kRequestBytes; ++said) {
    const Server server(/*connections=*/8);
    const std::string request = kRequest;
    const auto honest = server.Connect(request.substr(0, said));
    std::vector<std::unique_ptr<HttpClient>> silent;
    for (int i = 0; i < 40; ++i) silent.push_back(server.Connect());
    // Answered after all before it were let in.
    EXPECT_THAT(server.Connect(kRequest)->ReadAnswer(), EndsWith("\r\n\r\nbody"));
    honest->Send(request.substr(said));
    EXPECT_THAT(honest->ReadAnswer(), EndsWith("\r\n\r\nbody")) << said;
  }
}

TEST(HttpRoom, ANewcomerHasTimeToAskBesideThoseThatNeverAskToTheEnd) {
  const Server server(/*connections=*/16);
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (int i = 0; i < 40; ++i) slow.push_back(server.Connect("GET / HT"));
  const auto honest = server.Connect();
  EXPECT_THAT(server.Connect(kRequest)->ReadAnswer(), EndsWith("\r\n\r\nbody"));
  honest->Send(kRequest);
  EXPECT_THAT(honest->ReadAnswer(), EndsWith("\r\n\r\nbody"));
}

}  // namespace
}  // namespace treadle
