// The load client's reading of HTTP: RFC 9112 and the WHATWG's server-sent events, cut everywhere.
#include "bench/load/http_response.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/load/http_caller.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// The body of `bytes` that come in two parts, cut at `cut`; or the error.
std::string ReadCut(const std::string& bytes, size_t cut, HttpResponseParser& parser) {
  std::string body;
  const auto take = [&](std::string_view piece) { body += piece; };
  for (const std::string& part : {bytes.substr(0, cut), bytes.substr(cut)}) {
    const auto taken = parser.Feed(part, take);
    if (!taken.ok()) return std::string(taken.status().message());
    if (*taken != part.size()) return "something follows";
  }
  const absl::Status end = parser.End();
  return end.ok() ? body : std::string(end.message());
}

TEST(HttpResponse, BodiesOfEveryFramingAreReadHoweverTheyAreCut) {
  const std::pair<std::string, bool> answers[] = {
      {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", true},
      {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nconnection: Close\r\n"
       "content-length:5\r\n\r\nhello",
       false},
      // RFC 9112, section 7.1: extensions of chunks and trailers are passed over.
      {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\n"
       "X-Trailer: 1\r\n\r\n",
       true},
      {"HTTP/1.0 200 OK\n\nhello", false}};
  for (const auto& [bytes, keeps] : answers) {
    for (size_t cut = 0; cut <= bytes.size(); ++cut) {
      HttpResponseParser parser;
      ASSERT_EQ(ReadCut(bytes, cut, parser), "hello") << bytes << " cut at " << cut;
      ASSERT_EQ(parser.status(), 200);
      ASSERT_EQ(parser.keep_alive(), keeps) << bytes;
    }
  }
}

TEST(HttpResponse, WhatIsNoAnswerIsSaid) {
  const std::pair<const char*, const char*> answers[] = {
      {"SSH-2.0-OpenSSH_9.2\r\n", "begins with 'SSH-2.0-OpenSSH_9.2'"},
      {"HTTP/1.1 2x0 OK\r\n", "expected HTTP/1.1 NNN"},
      {"HTTP/1.1 200 OK\r\nnonsense\r\n", "without a colon"},
      {"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n", "content-length is '-1'"},
      {"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n", "expected chunked"},
      {"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", "expected hexadecimal"},
      {"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than its size"},
      {"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhell", "before its answer was whole"}};
  for (const auto& [bytes, why] : answers) {
    HttpResponseParser parser;
    EXPECT_THAT(ReadCut(bytes, 3, parser), HasSubstr(why));
  }
  HttpResponseParser parser;
  EXPECT_THAT(ReadCut("HTTP/1.1 200 OK\r\nx: " + std::string(70'000, 'x'), 9, parser),
              HasSubstr("a head of more than"));
}

// Lines may end with CR, LF or both; comments and other fields are passed over; data of several
// lines is joined (HTML, section 9.2.6).
TEST(EventStream, DataIsReadHoweverItIsCut) {
  const std::string bytes =
      ": comment\r\n\r\ndata: {\"a\"\r\ndata: :1}\r\n\r\nid: 7\ndata:b\rdata:  c\r\rdata\n\nevent: "
      "x\n\n"
      "data: [DONE]\n\ndata: without an end";
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    EventStreamParser parser;
    std::vector<std::string> events;
    const auto take = [&](std::string_view data) { events.emplace_back(data); };
    ASSERT_TRUE(parser.Feed(bytes.substr(0, cut), take).ok());
    ASSERT_TRUE(parser.Feed(bytes.substr(cut), take).ok());
    ASSERT_THAT(events, ElementsAre("{\"a\"\n:1}", "b\n c", "", "[DONE]")) << cut;
  }
}

TEST(HttpUrl, IsReadOrRefused) {
  const auto url = ParseHttpUrl("https://[::1]:8443/base/");
  ASSERT_TRUE(url.ok()) << url.status();
  EXPECT_TRUE(url->tls);
  EXPECT_EQ(url->host, "::1");
  EXPECT_EQ(url->port, 8443);
  EXPECT_EQ(url->path, "/base");
  EXPECT_EQ(ParseHttpUrl("https://host")->port, 443);
  EXPECT_EQ(ParseHttpUrl("localhost:8000")->port, 8000);
  for (const char* bad : {"", "http://", "ftp://a:1/", "host:0", "host:65536", "a b", "h/?q=1"}) {
    EXPECT_THAT(ParseHttpUrl(bad).status().ToString(), HasSubstr("expected http://HOST:PORT"))
        << bad;
  }
}

}  // namespace
}  // namespace treadle
