// The page and its feed over real sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "base/status.h"
#include "base/version.h"
#include "server/page/page_files.h"
#include "server/page/page_routes.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/http/http_client.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

std::string GetText(const std::string& path, const std::string& headers = "") {
  return "GET " + path + " HTTP/1.1\r\nHost: localhost\r\n" + headers + "\r\n";
}
std::string Get(const TestServer& server, const std::string& path,
                const std::string& headers = "") {
  HttpClient client(server.http_port());
  client.Send(GetText(path, headers));
  return client.ReadAnswer();
}

// A reader of /timeline.
class Feed {
 public:
  explicit Feed(const TestServer& server, int receive_buffer = 0)
      : client_(server.http_port(), receive_buffer) {
    client_.Send(GetText("/timeline"));
  }
  // After the first line of an accepted one, or the answer to one that is not.
  std::string head() { return client_.ReadUntil("}\n"); }
  Json Next() {
    const std::string text = client_.ReadUntil("}\n");
    const size_t at = text.find('{');
    return at == std::string::npos ? Json() : Json::parse(text.substr(at));
  }

 private:
  HttpClient client_;
};

TEST(Page, ComesWithWhatKeepsABrowserToIt) {
  TestServer server;
  const std::string answer = Get(server, "/");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n"));
  EXPECT_THAT(answer,
              HasSubstr("\r\nContent-Security-Policy: default-src 'none'; script-src 'self'"));
  EXPECT_THAT(answer, HasSubstr("frame-ancestors 'none'"));
  EXPECT_THAT(answer, HasSubstr("require-trusted-types-for 'script'; trusted-types 'none'"));
  EXPECT_THAT(answer, HasSubstr("\r\nX-Content-Type-Options: nosniff\r\n"));
  EXPECT_THAT(answer, HasSubstr("\r\nCache-Control: no-cache\r\n"));
  EXPECT_THAT(answer, EndsWith("</html>\n"));
  std::smatch etag;
  ASSERT_TRUE(std::regex_search(answer, etag, std::regex("\r\nETag: (\"[0-9a-f]{16}\")\r\n")));
  HttpClient again(server.http_port());
  again.Send(GetText("/", "If-None-Match: " + etag[1].str() + "\r\n") + GetText("/version"));
  EXPECT_THAT(again.ReadUntil("\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 304 Not Modified\r\n"), Not(HasSubstr("Content-Length"))));
  EXPECT_THAT(again.ReadAnswer(), HasSubstr(kVersion));
  EXPECT_THAT(Get(server, "/", "If-None-Match: \"other\"\r\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

// Files that the page loads are there, and nothing is inline or from elsewhere: the policy, and
// a machine without a network, would not have it.
TEST(Page, HasAllThatItLoads) {
  const auto types = std::map<std::string, std::string>{{".js", "text/javascript; charset=utf-8"},
                                                        {".css", "text/css; charset=utf-8"},
                                                        {".svg", "image/svg+xml"}};
  TestServer server;
  const std::regex loads(R"re((?:src|href)="([^"]*)"|(?:import|from) "\./([^"]*)")re");
  // The ways in which a browser makes elements or code of a text: an answer of a model is one.
  const std::regex sinks(
      R"re(innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|\beval\b|new Function)re");
  size_t found = 0;
  for (const PageFile& file : EmbeddedFiles()) {
    const std::string text(file.bytes);
    EXPECT_FALSE(std::regex_search(text, sinks)) << file.path;
    EXPECT_FALSE(
        std::regex_search(text, std::regex(R"( (style|on[a-z]+)=["']|[ :]url\(|<script>|<style)")))
        << file.path;
    for (std::sregex_iterator next(text.begin(), text.end(), loads), end; next != end; ++next) {
      ++found;
      const std::string path =
          (*next)[1].matched ? "/" + (*next)[1].str() : "/page/" + (*next)[2].str();
      const std::string answer = Get(server, path);
      EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n")) << path;
      EXPECT_THAT(answer, HasSubstr("Content-Type: " + types.at(path.substr(path.rfind('.')))))
          << path;
    }
  }
  EXPECT_GT(found, EmbeddedFiles().size());
}

TEST(Timeline, TellsWhoCameRanAndLeft) {
  TestServer server({.gate_closed = true});
  Feed feed(server);
  EXPECT_THAT(feed.head(), HasSubstr(R"({"running_limit":4,"queue_limit":64})"));
  const std::string body = R"({"prompt": "abcdefgh", "max_tokens": 3, "ignore_eos": true})";
  HttpClient client(server.http_port());
  client.Send(
      Str("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: "
          "secret\r\nContent-Length: ",
          body.size(), "\r\n\r\n", body));
  server.gate().Open();
  Json arrivals = Json::array(), members = Json::array(), ends = Json::array();
  while (ends.empty()) {
    const Json record = feed.Next();
    ASSERT_TRUE(record.contains("members")) << record;
    EXPECT_EQ(record["total_pages"], 256);
    for (const Json& arrival : record["arrivals"]) arrivals.push_back(arrival);
    for (const Json& member : record["members"]) members.push_back(member);
    for (const Json& end : record["ends"]) ends.push_back(end);
  }
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals[0]["prompt_tokens"], 8);
  const Json number = arrivals[0]["request"];
  // Its client is told which one it is.
  EXPECT_THAT(client.ReadAnswer(), HasSubstr(Str("\r\nX-Request-Number: ", number.dump(), "\r\n")));
  ASSERT_GE(members.size(), 3u);  // perhaps one that was under way at the end
  EXPECT_EQ(members[0], Json({{"request", number}, {"tokens", 8}, {"phase", "initiation"}}));
  EXPECT_EQ(members[1], Json({{"request", number}, {"tokens", 1}, {"phase", "increment"}}));
  EXPECT_EQ(ends[0]["request"], number);
  EXPECT_EQ(ends[0]["output_tokens"], 3);
  EXPECT_EQ(ends[0]["request_id"], "");  // the client's own
}

TEST(Timeline, ASlowReaderIsToldWhatItMissed) {
  TestServer server;
  server.stack().Stop(absl::UnavailableError("over"));  // from here on the records are ours
  Feed slow(server, /*receive_buffer=*/4096);
  ASSERT_THAT(slow.head(), HasSubstr("running_limit"));
  Ledger& ledger = server.stack().ledger();
  constexpr uint64_t kRecords = 20'000;
  for (uint64_t i = 0; i < kRecords; ++i) {
    LedgerRecord record;
    record.members.assign(20, {.request = i});
    ledger.Append(std::move(record));
  }
  uint64_t told = 0, lost = 0;
  while (told + lost < kRecords) {
    const Json line = slow.Next();
    ASSERT_TRUE(line.is_object()) << told << " " << lost;
    if (line.contains("lost")) {
      lost += line["lost"].get<uint64_t>();
    } else if (!line["members"].empty()) {
      ++told;
      EXPECT_EQ(line["members"][0]["request"], told + lost - 1);
    }
  }
  EXPECT_GT(lost, kRecords / 4);
  EXPECT_GT(told, 1000u);
}

TEST(Timeline, HasRoomForSomeReaders) {
  TestServer server;
  std::vector<std::unique_ptr<Feed>> feeds;
  for (int i = 0; i < kTimelineReaders; ++i) {
    feeds.push_back(std::make_unique<Feed>(server));
    ASSERT_THAT(feeds.back()->head(), HasSubstr("HTTP/1.1 200 OK")) << i;
  }
  EXPECT_THAT(Get(server, "/timeline"),
              AllOf(StartsWith("HTTP/1.1 429 "), HasSubstr("16 readers of /timeline")));
  feeds.pop_back();
  EXPECT_TRUE(ComesTrue([&] { return Feed(server).head().starts_with("HTTP/1.1 200 OK"); }));
}

TEST(Timeline, HasNoReaderWhereOnlyItsHeadIsAskedFor) {
  TestServer server;
  std::vector<std::unique_ptr<HttpClient>> clients;
  for (int i = 0; i < 4 * kTimelineReaders; ++i) {
    clients.push_back(std::make_unique<HttpClient>(server.http_port()));
    for (int twice = 0; twice < 2; ++twice) {
      clients.back()->Send("HEAD /timeline HTTP/1.1\r\nHost: localhost\r\n\r\n");
    }
  }
  for (const auto& client : clients) {
    for (int twice = 0; twice < 2; ++twice) {
      EXPECT_THAT(client->ReadUntil("\r\n\r\n"),
                  AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("application/x-ndjson")));
    }
  }
  EXPECT_THAT(Feed(server).head(), HasSubstr("HTTP/1.1 200 OK"));
  clients[0]->Send(GetText("/version"));
  EXPECT_THAT(clients[0]->ReadAnswer(), HasSubstr(kVersion));
}

TEST(Timeline, AsksForAKeyAndThePageDoesNot) {
  const std::string path = TestPath("keys");
  WriteText(path, "key-0123456789abcdef alice\n");
  ASSERT_OK_AND_ASSIGN(const auto keys, ApiKeys::Open(path, {}));
  TestServerOptions options;
  options.adjust = [&](ServiceOptions& service) { service.keys = keys.get(); };
  TestServer server(options);
  EXPECT_THAT(Get(server, "/"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(Get(server, "/timeline"), StartsWith("HTTP/1.1 401 Unauthorized\r\n"));
  HttpClient client(server.http_port());
  client.Send(GetText("/timeline", "Authorization: Bearer key-0123456789abcdef\r\n"));
  EXPECT_THAT(client.ReadUntil("}\n"), StartsWith("HTTP/1.1 200 OK\r\n"));
}

}  // namespace
}  // namespace treadle
