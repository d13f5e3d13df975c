// Clients of OpenAI's API that go away, do not read, ask for too much, or may not: the limits and
// statuses are those of gRPC.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/status.h"
#include "server/access/tls_files.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/tls_client.h"
#include "tests/server/openai/openai_client.h"

namespace treadle {
namespace {

using Answer = HttpExchange;
using Json = nlohmann::json;
using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::StartsWith;

TEST(OpenAiServer, AClientThatGoesAwayFreesItsPlace) {
  TestServer server({.gate_closed = true});
  const std::string body = R"({"prompt": "abc", "max_tokens": 900, "ignore_eos": true, "n": 2)";
  for (const char* stream : {R"(, "stream": true})", "}"}) {
    const std::string id = Str("gone", stream[0]);
    auto client = std::make_unique<HttpClient>(server.http_port());
    client->Send(PostText(kCompletions, body + stream, "X-Request-Id: " + id + "\r\n"));
    server.gate().Allow(4);
    if (*stream == ',') {
      EXPECT_THAT(client->ReadUntil("\n\n"), HasSubstr("X-Request-Id: " + id));
    }
    EXPECT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 1; }));
    client.reset();
    std::this_thread::sleep_for(milliseconds(200));
    server.gate().Allow(2);
    EXPECT_TRUE(server.WaitLoad([](const auto& load) { return load.running() == 0; }));
  }
  server.gate().Open();
}

TEST(OpenAiServer, WhoDoesNotReadIsCancelled) {
  TestServer server({.stall_timeout = milliseconds(200), .gate_closed = true});
  HttpClient client(server.http_port(), /*receive_buffer=*/4096);
  client.Send(PostText(kCompletions,
                       R"({"prompt": "abc", "max_tokens": 1000, "ignore_eos": true, "n": 4,
                           "logprobs": 20, "stream": true})",
                       "X-Request-Id: slow\r\n"));
  server.gate().Allow(600);  // more than buffers hold, and not the end
  EXPECT_EQ(client.ReadUntil("\r\n"), "HTTP/1.1 200 OK\r\n");
  std::this_thread::sleep_for(milliseconds(500));
  server.gate().Open();
  const std::optional<LedgerEnd> end = server.EndOf("slow");
  ASSERT_TRUE(end);
  EXPECT_EQ(end->reason, "cancelled");
  EXPECT_LT(end->output_tokens, 4000);
  EXPECT_EQ(client.ReadAll().find("[DONE]"), std::string::npos);
}

TEST(OpenAiServer, PipelinedCallsAreAnsweredInTurn) {
  TestServer server;
  HttpClient client(server.http_port());
  const auto call = [](int tokens) {
    return PostText(kCompletions,
                    Str(R"({"prompt": "abc", "ignore_eos": true, "max_tokens": )", tokens, "}"));
  };
  client.Send(call(40) + call(1) + call(2));
  for (const int tokens : {40, 1, 2}) {
    EXPECT_EQ(ReadExchange(client.ReadAnswer()).body["usage"]["completion_tokens"], tokens);
  }
}

TEST(OpenAiServer, ErrorsHaveTheirStatus) {
  TestServerOptions options;
  options.gate_closed = true;
  options.scheduling.max_queue = 1;
  options.http.body_bytes = 4096;
  TestServer server(options);
  const std::string good = R"({"prompt": "abc", "max_tokens": 400, "ignore_eos": true})";
  const auto message = [](const Answer& answer) {
    return answer.body["error"]["message"].get<std::string>();
  };
  const Answer broken = Post(server, kCompletions, "{\"prompt\": }");
  EXPECT_EQ(broken.code, 400);
  EXPECT_EQ(message(broken), "the body: is not valid JSON at byte 12");
  EXPECT_THAT(broken.head, HasSubstr("X-Request-Id: cmpl-"));
  EXPECT_EQ(Post(server, kCompletions, R"({"prompt": "a", "model": "gpt"})").code, 404);
  EXPECT_EQ(Post(server, kCompletions, std::string(5000, ' ')).code, 413);
  const Answer odd = Post(server, kCompletions, good, "X-Request-Timeout: -1\r\n");
  EXPECT_EQ(odd.code, 400);
  EXPECT_THAT(message(odd), StartsWith("the header X-Request-Timeout is '-1', expected seconds"));
  EXPECT_EQ(Post(server, kCompletions, good, "X-Request-Timeout: 0.05\r\n").code, 504);

  HttpClient held(server.http_port());  // its place in the queue, or a batch of its own
  held.Send(PostText(kCompletions, good));
  EXPECT_TRUE(
      server.WaitLoad([](const auto& load) { return load.running() + load.waiting() > 0; }));
  std::vector<std::unique_ptr<HttpClient>> more;
  Answer full;
  for (int i = 0; i < 20 && full.code != 429; ++i) {
    more.push_back(std::make_unique<HttpClient>(server.http_port()));
    more.back()->Send(PostText(kCompletions, good));
    full = Post(server, kCompletions, good, "X-Request-Timeout: 0.2\r\n");
  }
  EXPECT_EQ(full.code, 429) << full.body;
  EXPECT_THAT(full.head, HasSubstr("Retry-After: 1\r\n"));
  EXPECT_EQ(full.body["error"]["code"], "rate_limit_exceeded");
  server.gate().Open();
  EXPECT_EQ(ReadExchange(held.ReadAnswer()).code, 200);
  more.clear();
  server.server().DrainAndStop(milliseconds(0));
  const Answer draining = Post(server, kCompletions, good);
  EXPECT_EQ(draining.code, 503) << draining.body;
  EXPECT_THAT(draining.head, HasSubstr("Retry-After: 1\r\n"));
}

TEST(OpenAiServer, AnErrorAfterTheBeginningEndsTheStream) {
  TestServer server({.gate_closed = true});
  HttpClient client(server.http_port());
  client.Send(PostText(kCompletions, R"({"prompt": "abc", "max_tokens": 900, "ignore_eos": true,
                                         "stream": true})"));
  server.gate().Allow(3);
  EXPECT_THAT(client.ReadUntil("\n\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
  server.gate().Open();
  server.server().DrainAndStop(milliseconds(0));
  const std::vector<Json> events = EventsIn(client.ReadUntil("0\r\n\r\n"));
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back()["error"]["message"], "the server is shutting down");
  EXPECT_EQ(events.back()["error"]["type"], "server_error");
}

TEST(OpenAiServer, KeysAndTlsAreThoseOfGrpc) {
  const std::string path = TestPath("keys");
  WriteText(path, "key-0123456789abcdef alice 3\n");
  const auto keys = ApiKeys::Open(path, {});
  const TestCa ca;
  const TlsFiles files{
      .certificate = TestPath("crt"), .key = TestPath("key"), .ca = TestPath("ca")};
  const PemPair pair = ca.Sign();
  WriteText(files.certificate, pair.certificate);
  WriteText(files.key, pair.key);
  WriteText(files.ca, ca.pem());
  const auto tls = OpenSocketTls(files, "http/1.1", {});
  ASSERT_TRUE(keys.ok() && tls.ok());
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.keys = keys->get(); };
  options.http.tls = tls->get();
  TestServer server(options);
  const auto ask = [&](const std::string& text, const PemPair& own) {
    TlsClient client(server.http_port(), {.ca = ca.pem(), .own = own});
    if (!client.Handshake()) return Answer();
    client.Send(text);
    return ReadExchange(client.ReadAll());
  };
  const std::string key = kClose + "Authorization: Bearer key-0123456789abcdef\r\n";
  const std::string body = R"({"prompt": "abc", "max_tokens": 2})";
  EXPECT_EQ(ask(PostText(kCompletions, body, key), ca.Sign()).code, 200);
  EXPECT_EQ(ask(PostText(kCompletions, body, key), {}).code, 0);
  const Answer stranger = ask(PostText(kCompletions, body, kClose), ca.Sign());
  EXPECT_EQ(stranger.code, 401);
  EXPECT_THAT(stranger.head, HasSubstr("WWW-Authenticate: Bearer\r\n"));
  EXPECT_EQ(stranger.body["error"]["code"], "invalid_api_key");
  EXPECT_EQ(stranger.body["error"]["message"],
            "no API key: expected the header 'authorization: Bearer KEY'");
  EXPECT_EQ(ask(HttpRequestText("GET /v1/models", "", kClose), ca.Sign()).code, 401);
  EXPECT_EQ(ask(HttpRequestText("GET /health", "", kClose), ca.Sign()).code, 200);
  EXPECT_EQ(ask(PostText("/tokenize", R"({"prompt": "a"})", kClose), ca.Sign()).code, 401);
  EXPECT_EQ(ask(PostText("/tokenize", R"({"prompt": "a"})", key), ca.Sign()).code, 200);
  // Two of three prompts are too many for the key.
  const Answer many = ask(PostText(kCompletions, R"({"prompt": ["a", "b", "c"]})", key), ca.Sign());
  EXPECT_EQ(many.code, 429);
  EXPECT_THAT(many.body["error"]["message"].get<std::string>(), HasSubstr("'alice' has used up"));
}

// One page of 16 of a prompt of 20: for who asks with the same key and salt.
TEST(OpenAiServer, CachedPromptsAreOfOneKeyAndOneSalt) {
  const std::string path = TestPath("salted-keys");
  WriteText(path, "key-1-0123456789abc ann\nkey-2-0123456789abc bob\nkey-3-0123456789abc ann\n");
  const auto keys = ApiKeys::Open(path, {});
  ASSERT_TRUE(keys.ok()) << keys.status();
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.keys = keys->get(); };
  TestServer server(options);
  const auto header = [](const std::string& key) {
    return "Authorization: Bearer " + key + "-0123456789abc\r\n";
  };
  Json body = {{"prompt", std::vector<int>(20, 7)}, {"max_tokens", 1}};
  const auto cached = [&](const std::string& key, const std::string& salt) {
    body["cache_salt"] = salt;
    const Answer answer = Post(server, kCompletions, body.dump(), header(key));
    EXPECT_EQ(answer.code, 200) << answer.body;
    return answer.body["usage"]["prompt_tokens_details"]["cached_tokens"].get<int>();
  };
  EXPECT_EQ(cached("key-1", ""), 0);
  EXPECT_EQ(cached("key-1", ""), 16);
  EXPECT_EQ(cached("key-2", ""), 0) << "another owner's";
  EXPECT_EQ(cached("key-3", ""), 16) << "another key of the first owner";
  EXPECT_EQ(cached("key-1", "salt"), 0);
  EXPECT_EQ(cached("key-1", "salt"), 16);
  EXPECT_EQ(cached("key-2", std::string("\0name ann\0", 10)), 0);
  body["cache_salt"] = std::string(257, 'x');
  const Answer refused = Post(server, kCompletions, body.dump(), header("key-1"));
  EXPECT_EQ(refused.code, 400);
  EXPECT_EQ(refused.body["error"]["message"], "cache_salt has 257 bytes, expected at most 256");
}

}  // namespace
}  // namespace treadle
