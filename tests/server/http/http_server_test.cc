// The HTTP server over real sockets: what it answers, and what it refuses.
#include "server/http/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "tests/server/http/echo_server.h"
#include "tests/server/http/http_client.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST(HttpServer, AnswersRequestsOfAConnectionInTurn) {
  const EchoServer server;
  HttpClient client(server.port());
  client.Send("GET /echo?name=x HTTP/1.1\r\nHost: localhost\r\nAUTHORIZATION:  Bearer k \r\n\r\n");
  const std::string reply = client.ReadAnswer();
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(reply, HasSubstr("Content-Length: 22\r\n"));
  EXPECT_THAT(reply, EndsWith("\r\n\r\n/echo|name=x|Bearer k|"));
  client.Send(Post("/%65ch%6F", "{}"));
  EXPECT_THAT(client.ReadAnswer(), EndsWith("/echo|||{}"));
}

TEST(HttpServer, RequestsThatComeTogetherAreAnsweredOneAfterAnother) {
  EchoServer server;
  HttpClient client(server.port());
  client.Send(Post("/hold", "") + Post("/hold", "") + Post("/echo", "last"));
  const auto first = server.Held();
  std::this_thread::sleep_for(milliseconds(50));
  first->Send({.body = "first"});
  EXPECT_THAT(client.ReadAnswer(), EndsWith("\r\n\r\nfirst"));
  first->Send({.body = "late"});  // is over
  const auto second = server.Held();
  second->Send({.body = "second"});
  EXPECT_THAT(client.ReadAnswer(), EndsWith("\r\n\r\nsecond"));
  EXPECT_THAT(client.ReadAnswer(), EndsWith("/echo|||last"));
}

TEST(HttpServer, OnlyItsOwnPageMayAsk) {
  const EchoServer server;
  const std::string own = Str("127.0.0.1:", server.port());
  const auto ask = [&](const std::string& origin) {
    return Ask(server, Str("POST /echo HTTP/1.1\r\nConnection: close\r\nHost: ", own,
                           origin.empty() ? "" : "\r\nOrigin: " + origin,
                           "\r\nContent-Length: 1\r\n\r\nx"));
  };
  for (const std::string& origin : {std::string(), "http://" + own, "HTTPS://" + own}) {
    EXPECT_THAT(ask(origin), AllOf(EndsWith("/echo|||x"), Not(HasSubstr("Access-Control"))));
  }
  for (const char* origin : {"http://evil.example", "http://127.0.0.1:1", "null", "*"}) {
    EXPECT_THAT(ask(origin), AllOf(StartsWith("HTTP/1.1 403 Forbidden\r\n"),
                                   HasSubstr(Str("the header Origin is '", origin, "', expected")),
                                   Not(HasSubstr("Access-Control"))));
  }
  EXPECT_THAT(Ask(server, "GET /echo HTTP/1.0\r\nOrigin: null\r\n\r\n"), HasSubstr(" 403 "));
}

TEST(HttpServer, AnAllowedPageMayAskAndRead) {
  const EchoServer server({.allow_origins = {"https://app.example", "http://b:3000"}});
  HttpClient client(server.port());
  const std::string page = "Origin: https://APP.example\r\n";
  client.Send("OPTIONS /echo HTTP/1.1\r\nHost: localhost\r\n" + page +
              "Access-Control-Request-Method: POST\r\n"
              "Access-Control-Request-Headers: authorization,x-stainless-os\r\n\r\n");
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 204 No Content\r\n"),
                    HasSubstr("\r\nAccess-Control-Allow-Origin: https://app.example\r\n"),
                    HasSubstr("\r\nVary: Origin\r\n"),
                    HasSubstr("\r\nAccess-Control-Allow-Methods: GET, HEAD, POST\r\n"),
                    HasSubstr("\r\nAccess-Control-Allow-Headers: authorization,x-stainless-os\r\n"),
                    Not(HasSubstr("Content-Length"))));
  const auto readable = HasSubstr("\r\nAccess-Control-Allow-Origin: https://app.example\r\n");
  client.Send(Post("/echo", "x", page));
  EXPECT_THAT(client.ReadAnswer(), AllOf(EndsWith("/echo|||x"), readable));
  client.Send(Post("/none", "x", page));
  EXPECT_THAT(client.ReadAnswer(), AllOf(StartsWith("HTTP/1.1 404 "), readable));
  client.Send(Post("/echo", "x"));
  EXPECT_THAT(client.ReadAnswer(), AllOf(EndsWith("/echo|||x"), Not(readable)));
  client.Send("OPTIONS /echo HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(client.ReadAnswer(), StartsWith("HTTP/1.1 405 "));
  client.Send("OPTIONS /echo HTTP/1.1\r\nHost: localhost\r\nOrigin: https://c.example\r\n\r\n");
  EXPECT_THAT(client.ReadAnswer(), StartsWith("HTTP/1.1 403 "));

  const EchoServer open({.allow_origins = {"*"}});
  EXPECT_THAT(
      Ask(open, "GET /echo HTTP/1.0\r\nHost: x\r\nOrigin: null\r\n\r\n"),
      AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("\r\nAccess-Control-Allow-Origin: *\r\n")));
}

TEST(HttpServer, OnItsOwnMachineItHasNoOtherNames) {
  const auto ask = [](const EchoServer& server, const std::string& host) {
    return Ask(server, "GET /echo HTTP/1.1\r\nConnection: close\r\nHost: " + host + "\r\n\r\n");
  };
  const EchoServer server({.allow_origins = {"https://app.example"}});
  for (const char* host : {"localhost", "LOCALHOST:81", "a.localhost:1", "127.0.0.1:80",
                           "127.8.9.1", "[::1]:80", "10.0.0.3:80", "[fe80::1]", "app.example"}) {
    EXPECT_THAT(ask(server, host), StartsWith("HTTP/1.1 200 ")) << host;
  }
  for (const char* host : {"evil.example", "evil.example:80", "127.evil.example",
                           "localhost.evil.example", "app.example:81"}) {
    EXPECT_THAT(ask(server, host),
                AllOf(StartsWith("HTTP/1.1 403 "),
                      HasSubstr(Str("the header Host is '", host, "', expected"))))
        << host;
  }
  EXPECT_THAT(ask(EchoServer({.any_host = true}), "a.example"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(ask(EchoServer({}, "0.0.0.0:0"), "a.example"), StartsWith("HTTP/1.1 200 "));
}

TEST(HttpServer, ABodyMayComeInPiecesAndChunks) {
  const EchoServer server;
  HttpClient client(server.port());
  for (const char c : Post("/echo", "body")) client.Send(std::string(1, c));
  EXPECT_THAT(client.ReadAnswer(), EndsWith("|body"));
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
      "chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n");
  client.Send("0\r\n\r\n");
  EXPECT_THAT(client.ReadAnswer(), EndsWith("|abcde"));
  for (const char* piece :
       {"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", "0\r\n",
        "\r", "\n"}) {
    client.Send(piece);
  }
  EXPECT_THAT(client.ReadAnswer(), EndsWith("|"));
  const std::string large(1 << 20, 'y');
  client.Send(Post("/echo", large));
  EXPECT_THAT(client.ReadAnswer(), EndsWith("|" + large));
}

TEST(HttpServer, WhoAsksFirstIsToldToGoOn) {
  const EchoServer server({.body_bytes = 4});
  HttpClient client(server.port());
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: "
      "4\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.Send("abcd");
  EXPECT_THAT(client.ReadAnswer(), EndsWith("|abcd"));
  client.Send(
      "POST /echo HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: "
      "5\r\n\r\n");
  EXPECT_THAT(client.ReadAll(), StartsWith("HTTP/1.1 413 "));
}

TEST(HttpServer, OldClientsAndHeadsAreServed) {
  EchoServer server;
  EXPECT_THAT(Ask(server, "GET /echo HTTP/1.0\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("Connection: close")));
  HttpClient kept(server.port());
  kept.Send("GET /echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_THAT(kept.ReadAnswer(), HasSubstr("Connection: keep-alive"));
  kept.Send(
      "HEAD /echo HTTP/1.1\r\nHost: localhost\r\n\r\nGET /echo?2 HTTP/1.1\r\nHost: "
      "localhost\r\n\r\n");
  const std::string head = kept.ReadUntil("\r\n\r\n");
  EXPECT_THAT(head, HasSubstr("Content-Length: 8\r\n"));
  EXPECT_THAT(kept.ReadAnswer(), AllOf(StartsWith("HTTP/1.1 200"), EndsWith("/echo|2||")));
  // Without chunks, the end of a stream is the connection's.
  HttpClient old(server.port());
  old.Send("POST /hold HTTP/1.0\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n");
  const auto reply = server.Held();
  reply->Begin({.content_type = "a/b"});
  reply->Write("x");
  reply->Write("y");
  reply->End();
  EXPECT_THAT(old.ReadAll(), AllOf(Not(HasSubstr("chunked")), EndsWith("close\r\n\r\nxy")));
}

TEST(HttpServer, AStreamEndsAfterItsHeadWhereOnlyThatIsAskedFor) {
  EchoServer server;
  HttpClient client(server.port());
  client.Send(
      "HEAD /hold HTTP/1.1\r\nHost: localhost\r\n\r\nGET /echo?2 HTTP/1.1\r\nHost: "
      "localhost\r\n\r\n");
  auto reply = server.Held();
  std::atomic<int> lost = 0, done = 0;
  reply->Begin({.content_type = "text/event-stream", .body = "first"});
  EXPECT_TRUE(server.WaitClosed(1));  // nobody reads what the handler would write
  for (int i = 0; i < 3; ++i) reply->Write("x", [&](bool sent) { lost += sent ? 100 : 1; });
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), HasSubstr("text/event-stream"),
                    Not(HasSubstr("Connection: close"))));
  EXPECT_THAT(client.ReadAnswer(), AllOf(StartsWith("HTTP/1.1 200"), EndsWith("/echo|2||")));
  reply->End([&] { ++done; });
  reply.reset();
  server.Stop();
  EXPECT_EQ(lost, 3);
  EXPECT_EQ(done, 1);
}

TEST(HttpServer, WhatIsNoRequestIsRefused) {
  const EchoServer server;
  const auto refused = [&](const std::string& text) {
    const std::string reply = Ask(server, text);
    return reply.substr(0, reply.find("\r\n"));
  };
  EXPECT_EQ(refused("nonsense\r\n\r\n"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(refused("GET /\r\n\r\n"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(refused("GET /echo HTTP/2.0\r\n\r\n"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(refused("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"),
            "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(refused("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                    "1\r\nContent-Length: 2\r\n\r\nab"),
            "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(
      refused("POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
      "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(refused("GET / HTTP/1.1\r\nHost: localhost\r\nX: " + std::string(10'000, 'x')),
            "HTTP/1.1 431 Request Header Fields Too Large");
  EXPECT_EQ(
      refused("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"),
      "HTTP/1.1 413 Payload Too Large");
  EXPECT_THAT(Ask(server, "GET /no HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 404 Not Found\r\n"), HasSubstr("there is no /no")));
  EXPECT_THAT(Ask(server, "PUT /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
              AllOf(StartsWith("HTTP/1.1 405 Method Not Allowed\r\n"),
                    HasSubstr("\r\nAllow: GET, HEAD, POST\r\n")));
}

TEST(HttpServer, AContentLengthThatLies) {
  const EchoServer server({.body_patience = milliseconds(200)});
  // Less than there is: what follows is no request.
  HttpClient more(server.port());
  more.Send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nabcd\r\n\r\n");
  EXPECT_THAT(more.ReadAnswer(), EndsWith("|ab"));
  EXPECT_THAT(more.ReadAll(), StartsWith("HTTP/1.1 400 "));
  // More than there is.
  EXPECT_THAT(Ask(server, "POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nab"),
              AllOf(StartsWith("HTTP/1.1 408 "), HasSubstr("not whole within 200 ms")));
  HttpClient gone(server.port());
  gone.Send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nab");
  gone.Close();
  EXPECT_THAT(Ask(server, "GET /echo HTTP/1.0\r\n\r\n"), EndsWith("/echo|||"));
}

TEST(HttpServer, CompressedBodiesAreRefusedByTheirCoding) {
  const EchoServer server;
  for (const char* coding : {"gzip", "br", "identity, zstd"}) {
    HttpClient client(server.port());
    client.Send(Post("/echo", "x", Str("Content-Encoding: ", coding, "\r\n")));
    EXPECT_THAT(client.ReadAnswer(),
                AllOf(StartsWith("HTTP/1.1 415 Unsupported Media Type\r\n"),
                      HasSubstr("\r\nAccept-Encoding: identity\r\n"),
                      HasSubstr(Str("Content-Encoding is '", coding, "', expected"))));
    client.Send(Post("/echo", "x", "Content-Encoding: Identity\r\n"));
    EXPECT_THAT(client.ReadAnswer(), EndsWith("|x"));
  }
}

TEST(HttpServer, EmptyLinesBetweenRequestsBeginNone) {
  const EchoServer server({.connections = 4, .head_patience = std::chrono::hours(1)});
  HttpClient first(server.port());
  for (int i = 0; i < 2; ++i) {
    first.Send("\r\n" + Post("/echo", "x") + "\r\n");
    EXPECT_THAT(first.ReadAnswer(), EndsWith("|x"));
  }
  // It is the oldest of those that ask nothing, so it makes room for a fifth.
  std::vector<std::unique_ptr<HttpClient>> others;
  for (int i = 0; i < 4; ++i) {
    others.push_back(std::make_unique<HttpClient>(server.port()));
    others.back()->Send(Post("/echo", "y"));
    EXPECT_THAT(others.back()->ReadAnswer(), EndsWith("|y"));
  }
  EXPECT_EQ(first.ReadAll(), "");
  others[0]->Send(Post("/echo", "z"));
  EXPECT_THAT(others[0]->ReadAnswer(), EndsWith("|z"));
  std::string lines;
  for (int i = 0; i < 5000; ++i) lines += "\r\n";
  EXPECT_THAT(Ask(server, lines + Post("/echo", "z")), StartsWith("HTTP/1.1 431 "));
}

TEST(HttpServer, AnOccupiedAddressIsNamed) {
  const EchoServer server;
  const std::string address = "127.0.0.1:" + std::to_string(server.port());
  const auto other = HttpServer::Start(address, {}, {});
  EXPECT_EQ(other.status().message(), "cannot listen on " + address + ": Address already in use");
}

}  // namespace
}  // namespace treadle
