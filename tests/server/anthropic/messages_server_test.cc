// Anthropic's Messages API over real sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "server/access/api_keys.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/http_exchange.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;

const char kTemplate[] = "{% for m in messages %}{{ m.content }}{% endfor %}";
const char kBody[] = R"("messages": [{"role": "user", "content": "hello"}], "temperature": 0})";

// Head and body; the body of a stream is whole.
std::string Post(const TestServer& server, const std::string& path, const std::string& body,
                 const std::string& headers = "") {
  return ExchangeText(server.http_port(), "POST " + path, body, headers);
}
Json BodyOf(const std::string& reply) { return ReadExchange(reply).body; }

TEST(MessagesServer, AnswersAreThoseOfAChat) {
  TestServer server({.chat_template = kTemplate});
  const std::string reply =
      Post(server, "/v1/messages?beta=true", Str(R"({"max_tokens": 9, )", kBody),
           "anthropic-version: 2023-06-01\r\nX-Request-Id: mine\r\n");
  EXPECT_THAT(reply, HasSubstr("request-id: mine\r\n"));
  const Json message = BodyOf(reply);
  ASSERT_EQ(message["type"], "message") << reply;
  const Json chat = BodyOf(
      Post(server, "/v1/chat/completions", Str(R"({"max_tokens": 9, )", kBody)))["choices"][0];
  EXPECT_EQ(message["content"][0]["text"], chat["message"]["content"]);
  EXPECT_THAT(message["id"].get<std::string>(), testing::StartsWith("msg_"));

  const Json count = BodyOf(Post(server, "/v1/messages/count_tokens", Str("{", kBody)));
  EXPECT_EQ(count, Json({{"input_tokens", message["usage"]["input_tokens"]}}));
}

TEST(MessagesServer, AStreamTellsTheSame) {
  TestServer server({.chat_template = kTemplate});
  const auto body = [](bool stream) {
    return Str(R"({"max_tokens": 9, "stream": )", stream ? "true, " : "false, ", kBody);
  };
  const Json whole = BodyOf(Post(server, "/v1/messages", body(false)));
  const std::string stream = Post(server, "/v1/messages", body(true));
  std::string text;
  std::vector<std::string> types;
  for (size_t at = 0; (at = stream.find("\ndata: ", at)) != std::string::npos; ++at) {
    const size_t begin = at + 7;
    const Json event = Json::parse(stream.substr(begin, stream.find('\n', begin) - begin));
    const std::string type = event["type"];
    EXPECT_THAT(stream.substr(0, at), testing::EndsWith("event: " + type));
    if (types.empty() || types.back() != type) types.push_back(type);
    if (type == "content_block_delta") text += event["delta"]["text"].get<std::string>();
    if (type == "message_delta") {
      EXPECT_EQ(event["delta"]["stop_reason"], whole["stop_reason"]);
      EXPECT_EQ(event["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    }
  }
  EXPECT_EQ(text, whole["content"][0]["text"]);
  EXPECT_EQ(types, (std::vector<std::string>{"message_start", "ping", "content_block_start",
                                             "content_block_delta", "content_block_stop",
                                             "message_delta", "message_stop"}));
}

TEST(MessagesServer, AKeyMayComeInItsOwnHeader) {
  const std::string path = TestPath("messages-keys");
  WriteText(path, "key-1-0123456789abc ann\n");
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(path, {}));
  TestServerOptions options{.chat_template = kTemplate};
  options.adjust = [&](ServiceOptions& service) { service.keys = keys.get(); };
  TestServer server(options);
  for (const char* route : {"/v1/messages", "/v1/messages/count_tokens"}) {
    const auto code = [&](const std::string& headers) {
      return Post(server, route, Str(R"({"max_tokens": 9, )", kBody), headers).substr(9, 3);
    };
    EXPECT_EQ(code("x-api-key: key-1-0123456789abc\r\n"), "200");
    EXPECT_EQ(code("Authorization: Bearer key-1-0123456789abc\r\n"), "200");
    EXPECT_EQ(code("x-api-key: key-2-0123456789abc\r\n"), "401");
    EXPECT_EQ(code("Authorization: Bearer other\r\nx-api-key: key-1-0123456789abc\r\n"), "401");
    EXPECT_EQ(BodyOf(Post(server, route, "{}"))["error"]["type"], "authentication_error");
  }
}

TEST(MessagesServer, WhatIsRefusedIsToldInAnthropicsWords) {
  TestServer server({.chat_template = kTemplate});
  for (const char* route : {"/v1/messages", "/v1/messages/count_tokens"}) {
    const std::string reply =
        Post(server, route, Str(R"({"max_tokens": 9, "model": "other", )", kBody));
    EXPECT_THAT(reply, testing::StartsWith("HTTP/1.1 404"));
    EXPECT_EQ(BodyOf(reply)["error"]["type"], "not_found_error") << reply;
    EXPECT_EQ(BodyOf(Post(server, route, "{"))["error"]["type"], "invalid_request_error");
  }
}

}  // namespace
}  // namespace treadle
