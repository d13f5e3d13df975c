// OpenAI's Responses API over real sockets: whose responses are kept for whom.
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
using testing::StartsWith;

const char kTemplate[] = "{% for m in messages %}{{ m.content }}{% endfor %}";

std::string Ask(const TestServer& server, const std::string& method_and_path,
                const std::string& body = "", const std::string& headers = "") {
  return ExchangeText(server.http_port(), method_and_path, body, headers);
}
Json BodyOf(const std::string& reply) { return ReadExchange(reply).body; }
std::string Body(const std::string& more) {
  return Str(R"({"input": "hello", "temperature": 0, "max_output_tokens": 9)", more, "}");
}

TEST(ResponsesServer, AnswersAreThoseOfAChat) {
  TestServer server({.chat_template = kTemplate});
  const Json response = BodyOf(Ask(server, "POST /v1/responses", Body("")));
  ASSERT_EQ(response["object"], "response") << response;
  const Json chat = BodyOf(Ask(
      server, "POST /v1/chat/completions",
      R"({"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 9})"));
  EXPECT_EQ(response["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);

  const std::string stream = Ask(server, "POST /v1/responses", Body(R"(, "stream": true)"));
  EXPECT_THAT(stream, HasSubstr("event: response.created\ndata: {"));
  EXPECT_THAT(stream, testing::Not(HasSubstr("[DONE]")));
  const size_t last = stream.rfind("data: ") + 6;
  const Json done = Json::parse(stream.substr(last, stream.find('\n', last) - last));
  EXPECT_EQ(done["response"]["output"][0]["content"], response["output"][0]["content"]);
}

TEST(ResponsesServer, KeepsThemForTheirOwnersOnly) {
  const std::string path = TestPath("responses-keys");
  WriteText(path, "key-1-0123456789abc ann\nkey-2-0123456789abc bob\nkey-3-0123456789abc ann\n");
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(path, {}));
  TestServerOptions options{.chat_template = kTemplate};
  options.adjust = [&](ServiceOptions& service) { service.keys = keys.get(); };
  TestServer server(options);
  const auto key = [](int number) {
    return Str("Authorization: Bearer key-", number, "-0123456789abc\r\n");
  };
  const Json first = BodyOf(Ask(server, "POST /v1/responses", Body(""), key(1)));
  ASSERT_TRUE(first.contains("id")) << first;
  const std::string id = first["id"], at = "/v1/responses/" + id;
  EXPECT_EQ(BodyOf(Ask(server, "GET " + at, "", key(1))), first);
  EXPECT_EQ(BodyOf(Ask(server, "GET " + at, "", key(3))), first) << "another key of its owner";
  EXPECT_THAT(Ask(server, "GET " + at, "", key(2)), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(server, "GET " + at), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(Ask(server, "DELETE " + at, "", key(2)), StartsWith("HTTP/1.1 404"));
  EXPECT_THAT(Ask(server, "POST " + at, "{}", key(1)), StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Ask(server, "POST /v1/responses", Body("")), StartsWith("HTTP/1.1 401"));

  const std::string next = Body(Str(R"(, "previous_response_id": ")", id, "\""));
  const Json second = BodyOf(Ask(server, "POST /v1/responses", next, key(3)));
  ASSERT_TRUE(second.contains("usage")) << second;
  EXPECT_EQ(second["previous_response_id"], id);
  // A letter is a token of this model.
  EXPECT_EQ(second["usage"]["input_tokens"].get<size_t>(),
            10 + first["output"][0]["content"][0]["text"].get<std::string>().size());
  const std::string stranger = Ask(server, "POST /v1/responses", next, key(2));
  EXPECT_THAT(stranger, StartsWith("HTTP/1.1 400"));
  EXPECT_EQ(BodyOf(stranger)["error"]["param"], "previous_response_id");

  EXPECT_EQ(BodyOf(Ask(server, "DELETE " + at, "", key(1)))["deleted"], true);
  EXPECT_THAT(Ask(server, "GET " + at, "", key(1)), StartsWith("HTTP/1.1 404"));
  const Json not_kept =
      BodyOf(Ask(server, "POST /v1/responses", Body(R"(, "store": false)"), key(1)));
  EXPECT_THAT(Ask(server, "GET /v1/responses/" + not_kept["id"].get<std::string>(), "", key(1)),
              StartsWith("HTTP/1.1 404"));
}

}  // namespace
}  // namespace treadle
