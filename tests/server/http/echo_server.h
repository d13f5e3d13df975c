// An HttpServer for tests that answers with what it was asked, and lets a test hold its answers.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "server/http/http_server.h"
#include "tests/server/http/http_client.h"
#include "tests/support/in_time.h"

namespace treadle {

inline constexpr std::chrono::seconds kPatience{60};

// "/echo" answers at once, "/hold" when the test does.
class EchoServer {
 public:
  explicit EchoServer(const HttpOptions& options = {}, const std::string& address = "127.0.0.1:0") {
    const auto echo = [](const HttpRequest& request, const auto& reply) {
      reply->Send({.body = Str(request.path, "|", request.query, "|",
                               request.Header("authorization"), "|", request.body)});
    };
    const auto large = [](const HttpRequest&, const auto& reply) {
      reply->Send({.body = std::string(1 << 20, 'x')});
    };
    const auto hold = [this](const HttpRequest&, std::shared_ptr<HttpReply> reply) {
      reply->OnClosed([this] { ++closed; });
      MutexLock lock(mutex_);
      held_.push_back(std::move(reply));
      changed_.NotifyAll();
    };
    auto server = HttpServer::Start(address, options,
                                    {{"GET", "/echo", echo},
                                     {"POST", "/echo", echo},
                                     {"GET", "/large", large},
                                     {"GET", "/hold", hold},
                                     {"POST", "/hold", hold}});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~EchoServer() { Stop(); }
  void Stop() {
    {
      MutexLock lock(mutex_);
      held_.clear();
    }
    server_.reset();
  }
  int port() const { return server_->address().port; }
  // The next reply of "/hold"; null if none comes.
  std::shared_ptr<HttpReply> Held() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (held_.empty()) {
      if (!changed_.WaitUntil(mutex_, deadline)) return nullptr;
    }
    std::shared_ptr<HttpReply> reply = std::move(held_.front());
    held_.pop_front();
    return reply;
  }
  bool WaitClosed(int times) {
    return ComesTrue([&] { return closed >= times; }) && closed == times;
  }

  std::atomic<int> closed = 0;

 private:
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::shared_ptr<HttpReply>> held_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<HttpServer> server_;
};

inline std::string Post(const std::string& path, const std::string& body,
                        const std::string& more = "") {
  return Str("POST ", path, " HTTP/1.1\r\nHost: localhost\r\n", more,
             "Content-Length: ", body.size(), "\r\n\r\n", body);
}

inline std::string Ask(const EchoServer& server, const std::string& text) {
  HttpClient client(server.port());
  client.Send(text);
  return client.ReadAll();
}

}  // namespace treadle
