// Attacks over HTTP/1, on the port of OpenAI's API.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "tests/attacks/attacked_server.h"
#include "tests/server/http_client.h"

namespace treadle {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

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

}  // namespace
}  // namespace treadle
