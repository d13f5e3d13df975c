// Attacks over HTTP/1, on the port of OpenAI's API.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "tests/attacks/attacked_server.h"
#include "tests/server/http/http_client.h"

namespace treadle {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr int kConnections = 16;

std::string Head(const std::string& path, const std::string& fields) {
  return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\n" + fields + "\r\n";
}
std::string Post(const std::string& path, const std::string& body) {
  return Head(path, Str("Content-Length: ", body.size(), "\r\n")) + body;
}
std::string Repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

class HttpAttacks : public AttackTest {
 protected:
  // Besides the other protocol's clients, who are asked after each test, those of this one.
  void TearDown() override {
    if (server_) {
      HttpClient client(server_->http_port());
      client.Send(Post("/v1/completions", R"({"prompt":"Once upon a time","max_tokens":4})"));
      EXPECT_THAT(client.ReadAnswer(), HasSubstr("200 OK"));
    }
    AttackTest::TearDown();
  }
  std::string Answer(const std::string& request) {
    HttpClient client(server_->http_port());
    client.Send(request);
    return client.ReadAnswer();
  }
};

TEST_F(HttpAttacks, AHeadWithoutEndIsCutOff) {
  Start();
  const std::string fields = Repeated("x-more: " + std::string(1000, 'x') + "\r\n", 16'000);
  for (int i = 0; i < kConnections; ++i) {
    EXPECT_THAT(Answer("POST /v1/completions HTTP/1.1\r\n" + fields),
                AnyOf(HasSubstr(" 431 "), ""));  // "": it did not listen to the end of its answer
  }
}

TEST_F(HttpAttacks, BodiesAreBoundedOneByOneAndTogether) {
  Start({"--max-receive-memory", "32M"});
  EXPECT_THAT(Answer(Head("/v1/completions", "Content-Length: 3000000000\r\n")),
              HasSubstr(" 413 "));
  const std::string chunked = Head("/v1/completions", "Transfer-Encoding: chunked\r\n");
  const std::string piece = "100000\r\n" + std::string(1 << 20, ' ') + "\r\n";
  for (int i = 0; i < kConnections; ++i) {
    EXPECT_THAT(Answer(chunked + Repeated(piece, 64)), AnyOf(HasSubstr(" 413 "), ""));
    // A chunk's extension that never ends.
    EXPECT_THAT(Answer(chunked + "1;" + std::string(1 << 20, 'x')), AnyOf(HasSubstr(" 400 "), ""));
  }
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 4 * kConnections; ++i) {  // 192 MB
    clients.push_back(std::make_unique<HttpClient>(server_->http_port()));
    clients.back()->Send(Head("/v1/completions", "Content-Length: 4000000\r\n") +
                         std::string(3 << 20, ' '));
  }
  EXPECT_LT(server_->memory_mb(), memory_ + 96);
}

// A proxy that reads another length than the server lets a client put a request into somebody
// else's answers.
TEST_F(HttpAttacks, NoRequestIsSmuggledBehindAnother) {
  Start();
  const std::string hidden = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
  const std::string length = Str("Content-Length: ", hidden.size(), "\r\n");
  const std::string chunked = "Transfer-Encoding: chunked\r\n", end = "0\r\n\r\n";
  const std::string old = "POST /tokenize HTTP/1.0\r\nConnection: keep-alive\r\n";
  for (const std::string& request :
       {Head("/tokenize", "Transfer-Encoding: gzip\r\nContent-Length: 5\r\n") + "12345" + hidden,
        Head("/tokenize", "Transfer-Encoding: chunked, identity\r\nContent-Length: 5\r\n") + end +
            hidden,
        Head("/tokenize", chunked + length) + end + hidden,
        Head("/tokenize", "Transfer-Encoding: x, chunked\r\n") + end + hidden,
        Head("/tokenize", "Transfer-Encoding:\r\n chunked\r\n") + end + hidden,
        Head("/tokenize", "Content-Length: 0\r\n" + length) + hidden,
        Head("/tokenize", "Content-Length: 0, 0\r\n") + hidden,
        Head("/tokenize", "Content-Length: 0\r\nHost: localhost\r\n") + hidden,
        Head("/tokenize", chunked) + "0;a=\"\n\"\r\n\r\n" + hidden,
        Head("/tokenize", chunked) + "0\r\nContent-Length: 1\r\n\r\n" + hidden,
        old + chunked + "\r\n" + end + hidden, old + "Host:\r\n\r\n" + hidden}) {
    HttpClient client(server_->http_port());
    client.Send(request + hidden);
    const std::string answers = client.ReadAll();
    EXPECT_THAT(answers, AnyOf(StartsWith("HTTP/1.1 400 "), StartsWith("HTTP/1.1 501 ")));
    EXPECT_THAT(answers, Not(HasSubstr("\"version\""))) << request;
  }
}

TEST_F(HttpAttacks, ConnectionsWithoutAWordDoNotLockTheDoor) {
  Start({}, /*descriptors=*/128);
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 200; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server_->http_port()));
    if (i % 2 == 0) clients.back()->Send("POST /v1/compl");
  }
  ExpectService();
  EXPECT_THAT(Answer(Post("/v1/completions", R"({"prompt":"a","max_tokens":1})")),
              HasSubstr("200 OK"));
}

TEST_F(HttpAttacks, ConnectionsThatComeAndGoCostNobodyAnAnswer) {
  Start();
  std::atomic<bool> over = false;
  std::vector<std::thread> attackers;
  for (int i = 0; i < 4; ++i) {
    attackers.emplace_back([&, port = i % 2 ? server_->http_port() : server_->port()] {
      while (!over) HttpClient client(port);
    });
  }
  for (int i = 0; i < 200; ++i) {
    EXPECT_THAT(Answer("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"), HasSubstr("200 OK"))
        << i;
    EXPECT_TRUE(i % 10 > 0 || server_->Live()) << i;
  }
  over = true;
  for (std::thread& attacker : attackers) attacker.join();
}

TEST_F(HttpAttacks, QuestionsForAHeadDoNotTakeThePlacesOfReaders) {
  Start();
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 4 * kConnections; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server_->http_port()));
    clients.back()->Send("HEAD /timeline HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_THAT(clients.back()->ReadUntil("\r\n\r\n"), HasSubstr("200 OK"));
  }
  HttpClient reader(server_->http_port());
  reader.Send("GET /timeline HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(reader.ReadUntil("running_limit"), HasSubstr("200 OK"));
  for (const auto& client : clients) {
    client->Send("GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_THAT(client->ReadAnswer(), HasSubstr("\"version\""));
  }
}

TEST_F(HttpAttacks, RequestsThatAreNeverReadAreBounded) {
  Start({"--stream-stall-timeout", "1s"});
  const std::string request =
      Post("/v1/completions",
           R"({"prompt":"a","max_tokens":60,"ignore_eos":true,"stream":true,"logprobs":5})");
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < kConnections; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server_->http_port(), /*receive_buffer=*/1024));
    clients.back()->Send(Repeated(request, 200));  // pipelined, and nobody reads
  }
  ExpectService();
}

TEST_F(HttpAttacks, BodiesThatCostMuchAreBoundedBeforeTheyDo) {
  Start();
  for (const bool closed : {false, true}) {
    const std::string deep = Repeated("[", 1'000'000) + (closed ? Repeated("]", 1'000'000) : "");
    EXPECT_THAT(Answer(Post("/v1/completions", R"({"prompt":)" + deep + (closed ? "}" : ""))),
                HasSubstr(" 400 "));
  }
  const std::string wide = Repeated("0,", 1'500'000) + "0";
  EXPECT_THAT(Answer(Post("/v1/completions", R"({"prompt":[)" + wide + "]}")), HasSubstr(" 400 "));
  EXPECT_THAT(
      Answer(Post("/v1/completions", R"({"prompt":[)" + Repeated("\"\",", 1'000'000) + R"(""]})")),
      HasSubstr("expected at most"));
  EXPECT_THAT(Answer(Post("/v1/chat/completions",
                          R"({"messages":[)" + Repeated("{},", 1'000'000) + "{}]}")),
              HasSubstr(" 400 "));
  EXPECT_THAT(Answer(Post("/detokenize", R"({"tokens":[)" + wide + "]}")),
              AnyOf(HasSubstr(" 400 "), HasSubstr("200 OK")));
}

// A value of JSON takes many times its text: eight bodies of four megabytes at once.
TEST_F(HttpAttacks, MillionsOfEmptyValuesTakeNoMemory) {
  Start();
  for (const std::string element : {"{}", "[]", "\"\"", "[{}]", "0"}) {
    SCOPED_TRACE(element);
    const int count = (4 << 20) / static_cast<int>(element.size() + 1) - 100;
    const std::string request =
        Post("/v1/chat/completions",
             R"({"messages":[)" + Repeated(element + ",", count) + element + "]}");
    std::vector<std::thread> clients;
    for (int i = 0; i < 8; ++i) {
      clients.emplace_back(
          [&] { EXPECT_THAT(Answer(request), AnyOf(HasSubstr(" 400 "), HasSubstr(" 429 "))); });
    }
    for (std::thread& client : clients) client.join();
    EXPECT_LT(server_->peak_memory_mb(), memory_ + 160);
    EXPECT_LT(server_->memory_mb(), memory_ + memory_ / 5);
  }
}

}  // namespace
}  // namespace treadle
