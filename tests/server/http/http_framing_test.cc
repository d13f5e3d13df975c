// Where a request of HTTP/1 begins and ends, by RFC 9112: bytes that two readers could take for
// different requests are refused, and nothing that follows them on their connection is answered.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/http/http_server.h"
#include "tests/server/http/http_client.h"

namespace treadle {
namespace {

using testing::StartsWith;

constexpr char kHost[] = "Host: a\r\n";
constexpr char kNext[] = "GET /next HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";

std::string Post(const std::string& fields, const std::string& body = "") {
  return "POST /echo HTTP/1.1\r\nHost: a\r\n" + fields + "\r\n" + body;
}
std::string Get(const std::string& fields, const std::string& version = "HTTP/1.1") {
  return "GET /echo " + version + "\r\n" + fields + "\r\n";
}
std::string Chunked(const std::string& body) {
  return Post("Transfer-Encoding: chunked\r\n", body);
}

struct Case {
  std::string bytes;
  int code;
  bool closed;  // what follows is not answered
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const auto add = [&](int code, const std::vector<std::string>& all) {
    for (const std::string& bytes : all) cases.push_back({bytes, code, code != 200});
  };
  // Accepted requests, so that the rest is not refused for another reason.
  add(200, {Get(kHost), Get("Connection: keep-alive\r\n", "HTTP/1.0"), Get("host:\ta:80 \r\n"),
            Get("Host: [::1]:80\r\n"), Get("Host: a:\r\n"), Get("Host: a_b-c.d\r\n"),
            Get("Host: a\r\nX: 1\r\nx: 2\r\nEmpty:\r\nAny: \xff\t!\r\n"),
            Get("Host: a\r\nOrigin: http://a\r\n"), Post("Content-Length: 5\r\n", "abcde"),
            Post("Content-Length: 005\r\n", "abcde"), Post("Content-Length: 0\r\n"),
            Post("transfer-encoding:\tCHUNKED \r\n", "5\r\nabcde\r\n0\r\n\r\n"),
            Chunked("2\r\nab\r\n003\r\ncde\r\n00\r\n\r\n"), Chunked("A\r\n0123456789\r\n0\r\n\r\n"),
            Chunked("1 ; a=\"q\\\"\t\" ;b = c\r\nx\r\n0;d\r\nTrailer: t\r\nHost: b\r\n\r\n")});
  // Empty lines before a request (RFC 9112, section 2.2), and the absolute form (section 3.2.2).
  add(200,
      {"\r\n" + Get(kHost), "\r\n\r\n\r\n" + Post("Content-Length: 5\r\n", "abcde"),
       Post("Content-Length: 5\r\n", "abcde\r\n"), "GET http://a/echo HTTP/1.1\r\nHost: a\r\n\r\n",
       "GET HTTPS://[::1]:80/echo?q=http://b HTTP/1.1\r\nHost: b\r\n\r\n",
       "GET http://a/echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"});
  for (const char* target : {"http://", "http:///echo", "http://u@a/echo", "http://a:x/echo",
                             "http://a,b/echo", "https://?echo"}) {
    add(400, {Str("GET ", target, " HTTP/1.1\r\nHost: a\r\n\r\n")});
  }
  add(400, {"GET http://a/echo HTTP/1.1\r\n\r\n", "GET http://a/echo HTTP/1.1\r\nHost: ,\r\n\r\n"});
  // Two lengths, or one that is no number.
  const std::string chunk = "5\r\nabcde\r\n0\r\n\r\n";
  for (const char* coding : {"gzip", "chunked", "chunked, identity", "x, chunked", "identity"}) {
    const std::string field = Str("Transfer-Encoding: ", coding, "\r\n");
    add(400, {Post(field + "Content-Length: 5\r\n", "abcde"),
              Post("Content-Length: 5\r\n" + field, "abcde"),
              "POST /echo HTTP/1.0\r\nConnection: keep-alive\r\n" + field + "\r\n" + chunk});
  }
  for (const char* coding :
       {"gzip", "identity", "chunked, gzip", "chunked, chunked", "chunked;q=1", "chunked,", "",
        "xchunked", "\"chunked\"", "chunked\r\nTransfer-Encoding: chunked",
        "chunked\r\nTransfer-Encoding: identity"}) {
    add(400, {Post(Str("Transfer-Encoding: ", coding, "\r\n"), chunk)});
  }
  for (const char* coding : {"gzip, chunked", "x,chunked", "x\r\nTransfer-Encoding: chunked"}) {
    add(501, {Post(Str("Transfer-Encoding: ", coding, "\r\n"), chunk)});
  }
  for (const char* length : {"5\r\nContent-Length: 6", "5\r\nContent-Length: 5", "5, 5", "5,6", "",
                             "+5", "-5", "0x5", "5 5", "5;", "5.0", "five"}) {
    add(400, {Post(Str("Content-Length: ", length, "\r\n"), "abcde")});
  }
  for (const char* length : {"99999999999", "18446744073709551621", "100000000000000000000005"}) {
    add(413, {Post(Str("Content-Length: ", length, "\r\n"), "abcde")});
  }
  // Lines that another reader ends elsewhere.
  add(400, {Post("Content-Length : 5\r\n", "abcde"), Post("Transfer-Encoding : chunked\r\n", chunk),
            Post(" Content-Length: 5\r\n", "abcde"), Post("X: 1\r\n Content-Length: 5\r\n"),
            Post("X:\r\n\tContent-Length: 5\r\n"), Post("X: 1\nContent-Length: 5\r\n", "abcde"),
            Post("X: 1\rContent-Length: 5\r\n", "abcde"), Post("X: 1\r\r\n"),
            Post("Content-Length: 5\n", "abcde"), Post(std::string("X: \0\r\n", 6)),
            Post("X: \x7f\r\n"), Post("Content-Length\x0b: 5\r\n", "abcde"), Post(": 5\r\n"),
            Post("Content-Length\r\n"), Post("Content(Length: 5\r\n"), Post("\xc3\xa4: 5\r\n")});
  add(400,
      {"GET  /echo HTTP/1.1\r\nHost: a\r\n\r\n", "GET /echo  HTTP/1.1\r\nHost: a\r\n\r\n",
       "GET /echo HTTP/1.1 \r\nHost: a\r\n\r\n", " GET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
       "GET\t/echo HTTP/1.1\r\nHost: a\r\n\r\n", "GET /echo http/1.1\r\nHost: a\r\n\r\n",
       "GET /echo HTTP/1.1\nHost: a\n\n", "GET /e cho HTTP/1.1\r\nHost: a\r\n\r\n",
       "G(T /echo HTTP/1.1\r\nHost: a\r\n\r\n", "GET /\x80 HTTP/1.1\r\nHost: a\r\n\r\n",
       "GET /echo\r\nHost: a\r\n\r\n", "\nGET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
       "\r\r\nGET /echo HTTP/1.1\r\nHost: a\r\n\r\n", " \r\nGET /echo HTTP/1.1\r\nHost: a\r\n\r\n",
       Get(kHost, "HTTP/1.2"), Get(kHost, "HTTP/2.0"), Get(kHost, "HTTP/1.10")});
  // The host that is asked, and the origin that asks.
  for (const char* host :
       {"", "a\r\nHost: a", "a\r\nHost: b", "a b", "a, b", "a,b", "u@a", "a/b", "a:x", "a:80:80",
        ":80", "[::1", "::1", "[]", "[::1]80", "a\tb", "\xff"}) {
    add(400, {Get(Str("Host: ", host, "\r\n"))});
    if (*host) add(400, {Get(Str("Connection: keep-alive\r\nHost: ", host, "\r\n"), "HTTP/1.0")});
  }
  add(400,
      {Get(""), Get("Hosts: a\r\n"), Get("Host: a\r\nOrigin: http://b\r\nOrigin: http://a\r\n"),
       Get("Host: a\r\nOrigin: http://a\r\norigin: http://a\r\n"),
       Get("Host: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n")});
  // Chunks.
  for (const char* body : {"5 \r\nabcde\r\n",
                           " 5\r\nabcde\r\n",
                           "0x5\r\nabcde\r\n",
                           "+5\r\nabcde\r\n",
                           "-5\r\nabcde\r\n",
                           "\r\nabcde\r\n",
                           "g\r\nabcde\r\n",
                           "5;\r\nabcde\r\n",
                           "5;a=\r\nabcde\r\n",
                           "5a;=b\r\nabcde\r\n",
                           "5;a=\"x\r\nabcde\r\n",
                           "5;a=\"\n\"\r\nabcde\r\n",
                           "5;\xff\r\nabcde\r\n",
                           "5;a b\r\nabcde\r\n",
                           "5;a\nabcde\r\n",
                           "5\nabcde\r\n",
                           "5\rabcde\r\n",
                           "5\r\nabcdef\r\n",
                           "5\r\nabcde\n",
                           "5\r\nabcde0\r\n\r\n",
                           "0\r\n a: b\r\n\r\n",
                           "0\r\na : b\r\n\r\n",
                           "0\r\nab\r\n\r\n",
                           "0\r\nContent-Length: 5\r\n\r\nabcde",
                           "0\r\nTransfer-Encoding: chunked\r\n\r\n",
                           "0\n\r\n",
                           "0\r\n\n"}) {
    add(400, {Chunked(body)});
  }
  add(413, {Chunked("fffffffffff\r\nabcde\r\n"), Chunked("10000000000000005\r\nabcde\r\n")});
  return cases;
}

class Server {
 public:
  Server() {
    const auto echo = [this](const HttpRequest& request, const auto& reply) {
      ++asked;
      reply->Send({.body = request.body});
    };
    const auto next = [this](const HttpRequest&, const auto& reply) {
      ++asked_next;
      reply->Send({.body = "next"});
    };
    server_ = *HttpServer::Start(
        "127.0.0.1:0", {.any_host = true},
        {{"GET", "/echo", echo}, {"POST", "/echo", echo}, {"GET", "/next", next}});
  }
  // All that comes, until the server closes.
  std::string Ask(const std::string& bytes, size_t cut = std::string::npos) const {
    HttpClient client(server_->address().port);
    for (size_t at = 0; at < bytes.size(); at += std::min(cut, bytes.size())) {
      client.Send(bytes.substr(at, cut));
    }
    return client.ReadAll();
  }

  std::atomic<int> asked = 0, asked_next = 0;

 private:
  std::unique_ptr<HttpServer> server_;
};

TEST(HttpFraming, IsByTheLetterOfTheStandard) {
  Server server;
  for (const Case& one : Cases()) {
    for (const size_t cut : {std::string::npos, size_t{1}}) {
      server.asked = server.asked_next = 0;
      const std::string answer = server.Ask(one.bytes + kNext, cut);
      SCOPED_TRACE(testing::PrintToString(one.bytes) + "\nanswered by\n" + answer);
      EXPECT_THAT(answer, StartsWith(Str("HTTP/1.1 ", one.code, " ")));
      EXPECT_EQ(server.asked, one.closed ? 0 : 1);
      EXPECT_EQ(server.asked_next, one.closed ? 0 : 1);
    }
  }
}

TEST(HttpFraming, NothingIsAnsweredAfterARefusal) {
  Server server;
  std::mt19937 random(20261125);
  const std::vector<std::string> pieces = {kNext,
                                           Get(kHost),
                                           "0\r\n\r\n",
                                           "\r\n",
                                           "abcde",
                                           "Content-Length: 0\r\n\r\n",
                                           "GET /next ",
                                           "HTTP/1.1\r\n",
                                           kHost,
                                           Post("Content-Length: 5\r\n", "abcde"),
                                           std::string(3, '\0')};
  for (const Case& one : Cases()) {
    if (!one.closed) continue;
    std::string bytes = one.bytes;
    for (size_t i = 0; i < 8; ++i) bytes += pieces[random() % pieces.size()];
    bytes += kNext;
    server.asked = server.asked_next = 0;
    const std::string answer = server.Ask(bytes, 1 + random() % bytes.size());
    SCOPED_TRACE(testing::PrintToString(bytes) + "\nanswered by\n" + answer);
    EXPECT_EQ(server.asked + server.asked_next, 0);
    EXPECT_EQ(answer.find("HTTP/1.1 ", 1), std::string::npos);
  }
}

// RFC 9112, section 3.2.2: the target's host, not the header's; 4.2.3 of RFC 9110: an empty path is
// "/".
TEST(HttpFraming, TheAbsoluteFormNamesTheHost) {
  const auto handle = [](const HttpRequest& request, const auto& reply) {
    reply->Send({.body = Str(request.Header("host"), "|", request.path, "|", request.query)});
  };
  const auto server = *HttpServer::Start("127.0.0.1:0", {.any_host = true},
                                         {{"GET", "/", handle}, {"GET", "/a", handle}});
  HttpClient client(server->address().port);
  for (const auto& [target, seen] : {std::pair{"http://b:81/a?q", "b:81|/a|q"},
                                     {"http://b", "b|/|"},
                                     {"http://b?q=/", "b|/|q=/"},
                                     {"/a?u=http://b/", "c|/a|u=http://b/"}}) {
    client.Send(Str("GET ", target, " HTTP/1.1\r\nHost: c\r\n\r\n"));
    EXPECT_THAT(client.ReadAnswer(), testing::EndsWith(Str("\r\n\r\n", seen)));
  }
}

TEST(HttpFraming, WhatComesAfterTheBodyIsNoField) {
  std::string seen;
  const auto handle = [&](const HttpRequest& request, const auto& reply) {
    reply->Send({.body = Str(request.Header("x-a"), "|", request.Header("x-b"), "|",
                             request.Header("x-c"))});
  };
  const auto server =
      *HttpServer::Start("127.0.0.1:0", {.any_host = true}, {{"POST", "/echo", handle}});
  HttpClient client(server->address().port);
  client.Send(Post("X-A: 1\r\nX-B: 1\r\nx-b: 2\r\nTransfer-Encoding: chunked\r\n",
                   "0\r\nX-A: 3\r\nX-C: 3\r\nConnection: close\r\nOrigin: http://b\r\n\r\n"));
  EXPECT_THAT(client.ReadAnswer(), testing::EndsWith("\r\n\r\n1|1, 2|"));
  client.Send(Post("Connection: close\r\nContent-Length: 0\r\n"));
  EXPECT_THAT(client.ReadAll(), StartsWith("HTTP/1.1 200 "));
}

}  // namespace
}  // namespace treadle
