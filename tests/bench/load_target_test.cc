// The load client against whole servers: the three protocols give the same answers, and whatever an
// HTTP server does is an answer or an error that says why.
#include "bench/load/load_target.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <tuple>

#include "base/status.h"
#include "bench/load/http_caller.h"
#include "net/address.h"
#include "server/access/tls_files.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/echo_server.h"
#include "tests/server/test_server.h"

namespace treadle {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

std::unique_ptr<LoadTarget> Connect(LoadProtocol protocol, const std::string& target,
                                    int32_t vocab = 0) {
  auto connected = ConnectToServer(
      {.protocol = protocol,
       .target = target,
       .access = {.credentials = grpc::InsecureChannelCredentials(), .authorization = {}},
       .vocab = vocab});
  EXPECT_TRUE(connected.ok()) << connected.status();
  return *std::move(connected);
}

// Remembers every prompt, and what was answered to it.
class Remembering final : public LoadTarget {
 public:
  explicit Remembering(LoadTarget& target) : target_(target) {}
  absl::StatusOr<Limits> GetLimits(std::chrono::seconds patience) override {
    return target_.GetLimits(patience);
  }
  void Send(LoadRequest request, LoadAnswer& answer) override {
    Kept& kept = kept_.emplace_back();
    kept.prompt = request.token_ids;
    kept.passed = {answer.sent,
                   [&kept, &answer](int32_t tokens, std::span<const int32_t> ids) {
                     kept.answer.insert(kept.answer.end(), ids.begin(), ids.end());
                     answer.received(tokens, ids);
                   },
                   answer.ended};
    target_.Send(std::move(request), kept.passed);
  }
  struct Kept {
    std::vector<int32_t> prompt, answer;
    LoadAnswer passed;
  };
  std::deque<Kept> kept_;

 private:
  LoadTarget& target_;
};

class EveryProtocol : public testing::TestWithParam<LoadProtocol> {
 protected:
  std::unique_ptr<LoadTarget> Connect() {
    const int port =
        GetParam() == LoadProtocol::kOpenAi ? server_.http_port() : server_.server().address().port;
    return treadle::Connect(GetParam(), Str("127.0.0.1:", port));
  }
  TestServer server_;
};

TEST_P(EveryProtocol, AnswersHaveTheirLengths) {
  const auto target = Connect();
  const auto limits = target->GetLimits(std::chrono::seconds(60));
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_EQ(limits->max_context, 1024);
  EXPECT_EQ(limits->vocab, TestServer::kVocab);
  EXPECT_EQ(limits->model, "prefix");
  EXPECT_EQ(limits->sampling_defaults, GetParam() == LoadProtocol::kVllmGrpc ? "" : "{}");

  SyntheticTrace options;
  options.num_requests = 40;
  options.request_rate = 2000;
  options.input = {1, 40};
  options.output = {1, 12};
  const auto trace = MakeTrace(options);
  const auto result = Replay(trace, *target, {});
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t i = 0; i < trace.size(); ++i) {
    const LoadRecord& request = result->requests[i];
    EXPECT_EQ(request.error, "");
    EXPECT_EQ(request.output_tokens, trace[i].output_tokens);
    EXPECT_EQ(std::ssize(request.token_times), trace[i].output_tokens);
    EXPECT_GE(request.sent, request.scheduled);
    EXPECT_GE(request.token_times.front(), request.sent);
    EXPECT_GE(request.lag, 0);
  }
}

// Three turns: each prompt begins with the one before it and the answer to that.
TEST_P(EveryProtocol, AConversationGoesOnFromItsAnswers) {
  const auto server = Connect();
  Remembering target(*server);
  const std::vector<TraceEntry> trace = {{0, 5, 4}, {0.01, 12, 3, 0}, {0, 7, 2}, {0, 17, 2, 1}};
  const auto result = Replay(trace, target, {});
  ASSERT_TRUE(result.ok()) << result.status();
  for (const LoadRecord& request : result->requests) ASSERT_EQ(request.error, "");
  EXPECT_GE(result->requests[1].scheduled, result->requests[0].end + 0.01);
  EXPECT_GE(result->requests[3].scheduled, result->requests[1].end);
  for (const size_t turn : {1, 3}) {
    const auto now = std::ranges::find(target.kept_, trace[turn].input_tokens,
                                       [](const auto& kept) { return std::ssize(kept.prompt); });
    const auto before = std::ranges::find(target.kept_, trace[trace[turn].after].input_tokens,
                                          [](const auto& kept) { return std::ssize(kept.prompt); });
    ASSERT_TRUE(now != target.kept_.end() && before != target.kept_.end());
    std::vector<int32_t> begin = before->prompt;
    begin.insert(begin.end(), before->answer.begin(), before->answer.end());
    ASSERT_EQ(std::ssize(before->answer), trace[trace[turn].after].output_tokens);
    EXPECT_TRUE(std::equal(begin.begin(), begin.end(), now->prompt.begin()));
  }
}

TEST_P(EveryProtocol, ARefusalIsTheRequestsError) {
  const auto target = Connect();
  ASSERT_TRUE(target->GetLimits(std::chrono::seconds(60)).ok());
  class Unlimited final : public LoadTarget {
   public:
    explicit Unlimited(LoadTarget& target) : target_(target) {}
    absl::StatusOr<Limits> GetLimits(std::chrono::seconds) override { return Limits{5000, 50}; }
    void Send(LoadRequest request, LoadAnswer& answer) override {
      target_.Send(std::move(request), answer);
    }
    LoadTarget& target_;
  } unlimited(*target);
  // The second turn of a conversation that failed is not sent.
  const auto result = Replay({{0, 1100, 4}, {0, 1110, 4, 0}, {0, 3, 2}}, unlimited, {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->requests[0].error, HasSubstr("1024"));
  EXPECT_EQ(result->requests[1].error, "not sent: the turn before it failed");
  EXPECT_EQ(result->requests[2].error, "");
}

TEST_P(EveryProtocol, NobodyThereIsSaid) {
  Address free = *ParseAddress("127.0.0.1:0");
  const auto listener = OpenListener(free);
  ASSERT_TRUE(listener.ok());
  close(*listener);
  const auto limits =
      treadle::Connect(GetParam(), ToString(free))->GetLimits(std::chrono::seconds(0));
  EXPECT_THAT(limits.status().ToString(), HasSubstr(ToString(free)));
}

INSTANTIATE_TEST_SUITE_P(Protocols, EveryProtocol,
                         testing::Values(LoadProtocol::kGrpc, LoadProtocol::kOpenAi,
                                         LoadProtocol::kVllmGrpc),
                         [](const auto& info) {
                           std::string name(WordOf(kLoadProtocols, info.param));
                           std::erase(name, '-');
                           return name;
                         });

// An HTTP server whose answer to a completion is `code` and `body`.
class Saying {
 public:
  Saying(std::string models, int code, std::string body, const SocketTls* tls = nullptr) {
    HttpOptions options;
    options.tls = tls;
    auto server = HttpServer::Start(
        "127.0.0.1:0", options,
        {{"GET", "/v1/models",
          [models](const HttpRequest&, const auto& reply) { reply->Send({.body = models}); }},
         {"POST", "/v1/completions",
          [this, code, body](const HttpRequest& request, const auto& reply) {
            asked = request;
            reply->Begin({.code = code, .content_type = "text/event-stream"});
            reply->Write(body);
            reply->End();
          }}});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string address() const { return ToString(server_->address()); }
  HttpRequest asked;

 private:
  std::unique_ptr<HttpServer> server_;
};

const char kModels[] = R"({"data":[{"id":"m","max_model_len":99,"vocab_size":7}]})";

LoadRecord AskOne(const Saying& server) {
  const auto target = Connect(LoadProtocol::kOpenAi, server.address());
  const auto result = Replay({{0, 3, 5}}, *target, {});
  EXPECT_TRUE(result.ok()) << result.status();
  return result->requests.at(0);
}

// llama.cpp: a piece of text for each token, and the usage at the end, by which some had no text.
TEST(OpenAiTarget, TokensAreCountedByPiecesWhereNothingElseSays) {
  const Saying server(
      kModels, 200,
      "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":"
      "\"b\"}]}\n\ndata: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}],"
      "\"usage\":{\"completion_tokens\":5}}\n\ndata: [DONE]\n\n");
  const LoadRecord request = AskOne(server);
  EXPECT_EQ(request.error, "");
  EXPECT_EQ(request.output_tokens, 5);
  EXPECT_THAT(
      server.asked.body,
      AllOf(StartsWith(R"({"model":"m","prompt":[)"), HasSubstr(R"("max_tokens":5)"),
            HasSubstr(R"("temperature":0,"stream":true)"), HasSubstr(R"("ignore_eos":true)")));
}

TEST(OpenAiTarget, EveryFailureIsAnErrorThatSaysWhy) {
  const std::tuple<int, const char*, const char*> answers[] = {
      {500, "out of\nmemory", "HTTP 500: out of\nmemory"},
      {200, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", "the stream ended without [DONE]"},
      {200, "data: {\"error\":{\"message\":\"lost\"}}\n\ndata: [DONE]\n\n", "\"lost\""},
      {200, "data: oops\n\ndata: [DONE]\n\n", "oops"}};
  for (const auto& [code, body, why] : answers) {
    EXPECT_THAT(AskOne(Saying(kModels, code, body)).error, HasSubstr(why));
  }
}

TEST(OpenAiTarget, WhatTheServerDoesNotSayMustBeGiven) {
  const Saying server(R"({"data":[{"id":"m"}]})", 200, "");
  const auto lacking = Connect(LoadProtocol::kOpenAi, server.address());
  EXPECT_THAT(lacking->GetLimits(std::chrono::seconds(0)).status().ToString(),
              HasSubstr("give --vocab-size"));
  const auto given = Connect(LoadProtocol::kOpenAi, "http://" + server.address() + "/v1/", 9);
  const auto limits = given->GetLimits(std::chrono::seconds(0));
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_EQ(limits->vocab, 9);
  const Saying empty(R"({"data":[]})", 200, "");
  EXPECT_THAT(Connect(LoadProtocol::kOpenAi, empty.address())
                  ->GetLimits(std::chrono::seconds(0))
                  .status()
                  .ToString(),
              HasSubstr("lists no model"));
}

TEST(OpenAiTarget, AnAnswerThatDoesNotComeEndsAtItsDeadline) {
  EchoServer server;
  auto caller = HttpCaller::Open(*ParseHttpUrl(Str("127.0.0.1:", server.port())), nullptr, "");
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_THAT((*caller)->Get("/hold", std::chrono::milliseconds(1)).status().ToString(),
              HasSubstr("not whole in time"));
}

// Reads a request from the connection, up to the end of its head; false: there is none.
bool ReadHead(int fd) {
  std::string head;
  for (char byte = 0; !head.ends_with("\r\n\r\n"); head += byte) {
    if (recv(fd, &byte, 1, 0) != 1) return false;
  }
  return true;
}

int Accept(int listener) {  // waits
  pollfd waits{.fd = listener, .events = POLLIN, .revents = 0};
  EXPECT_EQ(poll(&waits, 1, 60'000), 1);
  return accept(listener, nullptr, nullptr);
}

// A server may close a connection for being idle just when the next request comes on it.
TEST(OpenAiTarget, AConnectionThatIsClosedUnderARequestIsReplaced) {
  Address address = *ParseAddress("127.0.0.1:0");
  const auto listener = OpenListener(address);
  ASSERT_TRUE(listener.ok()) << listener.status();
  std::thread server([&] {
    const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    const int first = Accept(*listener);
    EXPECT_TRUE(ReadHead(first));
    EXPECT_GT(send(first, answer, sizeof answer - 1, 0), 0);
    EXPECT_TRUE(ReadHead(first));  // the second request comes on the same connection
    close(first);
    const int second = Accept(*listener);
    EXPECT_TRUE(ReadHead(second));
    EXPECT_GT(send(second, answer, sizeof answer - 1, 0), 0);
    close(second);
  });
  auto caller = HttpCaller::Open(*ParseHttpUrl(ToString(address)), nullptr, "");
  ASSERT_TRUE(caller.ok()) << caller.status();
  for (int i = 0; i < 2; ++i) {
    const auto answer = (*caller)->Get("/", std::chrono::minutes(1));
    EXPECT_TRUE(answer.ok() && *answer == "ok") << answer.status();
  }
  server.join();
  close(*listener);
}

TEST(OpenAiTarget, HttpsIsOnlyWithAServerThatIsKnown) {
  const TestCa ca, other;
  const PemPair pair = ca.Sign();
  const TlsFiles files = {.certificate = TestPath("crt"), .key = TestPath("key"), .ca = {}};
  WriteText(files.certificate, pair.certificate);
  WriteText(files.key, pair.key);
  const auto own = ReadTlsFiles(files);
  ASSERT_TRUE(own.ok()) << own.status();
  SocketTls tls("http/1.1");
  tls.Set(own->server);
  const Saying server(kModels, 200, "data: [DONE]\n\n", &tls);
  const std::string url = "https://" + server.address();
  for (const auto& [root, known] : {std::pair(&ca, true), std::pair(&other, false)}) {
    const std::string path = TestPath("ca");
    WriteText(path, root->pem());
    const auto material = ReadTlsFiles({.certificate = {}, .key = {}, .ca = path});
    ASSERT_TRUE(material.ok()) << material.status();
    auto caller = HttpCaller::Open(*ParseHttpUrl(url), material->client, "");
    ASSERT_TRUE(caller.ok()) << caller.status();
    EXPECT_EQ((*caller)->Get("/v1/models", std::chrono::minutes(1)).ok(), known);
  }
  EXPECT_THAT(HttpCaller::Open(*ParseHttpUrl(url), nullptr, "").status().ToString(),
              HasSubstr("--tls-ca"));
}

}  // namespace
}  // namespace treadle
