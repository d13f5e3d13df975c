// The HTTP server beside clients that are slow, silent, many, or gone.
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
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

TEST(HttpServer, UnfinishedBodiesAreLimitedTogether) {
  const EchoServer server({.body_bytes = 1 << 20, .receiving_bytes = (1 << 20) + 200'000});
  std::vector<std::unique_ptr<HttpClient>> slow;
  const auto begin = [&](size_t bytes) {
    slow.push_back(std::make_unique<HttpClient>(server.port()));
    slow.back()->Send("POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048576\r\n\r\n" +
                      std::string(bytes, 'x'));
  };
  begin(400'000);
  begin(700'000);
  begin(200'000);
  EXPECT_THAT(slow[1]->ReadAll(), AllOf(StartsWith("HTTP/1.1 503 "),
                                        HasSubstr("(--max-receive-memory)")));  // the largest
  slow[0]->Send(std::string(1048576 - 400'000, 'x'));
  EXPECT_THAT(slow[0]->ReadAnswer(), StartsWith("HTTP/1.1 200 "));
}

TEST(HttpServer, ClientsThatSayNothingAreCutOff) {
  const EchoServer server({.head_patience = milliseconds(50), .idle_patience = milliseconds(100)});
  EXPECT_EQ(Ask(server, "GET / HT"), "");
  HttpClient idle(server.port());
  idle.Send("GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(idle.ReadAll(), EndsWith("/echo|||"));
}

TEST(HttpServer, SlowClientsKeepNobodyOut) {
  EchoServer server({.connections = 4, .head_patience = std::chrono::hours(1)});
  HttpClient busy(server.port());
  busy.Send(Post("/hold", ""));
  const auto reply = server.Held();
  std::vector<std::unique_ptr<HttpClient>> slow;
  for (int i = 0; i < 40; ++i) {
    slow.push_back(std::make_unique<HttpClient>(server.port()));
    ASSERT_TRUE(slow.back()->connected());
    slow.back()->Send("GET / HTTP/1.1\r\nHost: localhost\r\n");
  }
  EXPECT_THAT(Ask(server, "GET /echo HTTP/1.0\r\n\r\n"), EndsWith("/echo|||"));
  EXPECT_EQ(slow.front()->ReadAll(), "");  // made room
  reply->Send({.body = "kept"});
  EXPECT_THAT(busy.ReadAnswer(), EndsWith("kept"));
}

TEST(HttpServer, NobodyMakesRoomWhoseRequestIsUnderWay) {
  EchoServer server({.connections = 8, .per_address = 2});
  HttpClient first(server.port()), second(server.port());
  first.Send(Post("/hold", ""));
  second.Send(Post("/hold", ""));
  const auto a = server.Held(), b = server.Held();
  EXPECT_EQ(Ask(server, "GET /echo HTTP/1.0\r\n\r\n"), "");  // closed at once
  a->Send({.body = "a"});
  b->Send({.body = "b"});
  EXPECT_THAT(first.ReadAnswer(), testing::ContainsRegex("\r\n\r\n[ab]$"));
  EXPECT_THAT(Ask(server, "GET /echo HTTP/1.0\r\n\r\n"), EndsWith("/echo|||"));
}

TEST(HttpServer, AStreamComesAsItIsWritten) {
  EchoServer server;
  HttpClient client(server.port());
  client.Send(Post("/hold", "") + Post("/echo", "next"));
  const auto reply = server.Held();
  reply->Begin({.content_type = "text/event-stream", .headers = {{"X-A", "b"}}});
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"),
              AllOf(HasSubstr("\r\nX-A: b\r\n"), HasSubstr("Transfer-Encoding: chunked")));
  std::atomic<int> written = 0, done = 0;
  for (int i = 0; i < 3; ++i) {
    reply->Write(Str("piece ", i), [&](bool sent) { written += sent ? 1 : 100; });
    EXPECT_EQ(client.ReadUntil("\r\n"), "7\r\n");
    EXPECT_EQ(client.ReadUntil("\r\n"), Str("piece ", i, "\r\n"));
  }
  reply->End([&] { ++done; });
  EXPECT_EQ(client.ReadUntil("0\r\n\r\n"), "0\r\n\r\n");
  EXPECT_THAT(client.ReadAnswer(), EndsWith("|next"));
  EXPECT_EQ(written, 3);
  EXPECT_EQ(done, 1);
  EXPECT_EQ(server.closed, 0);
}

TEST(HttpServer, AClientThatGoesAwayIsNoticed) {
  EchoServer server;
  std::atomic<int> lost = 0, done = 0;
  {
    HttpClient client(server.port());
    client.Send(Post("/hold", ""));
    const auto reply = server.Held();
    reply->Begin({});
    client.ReadUntil("\r\n\r\n");
    client.Close();
    EXPECT_TRUE(server.WaitClosed(1));
    reply->Write("x", [&](bool sent) { lost += sent ? 0 : 1; });
    reply->End([&] { ++done; });
  }
  {
    HttpClient client(server.port());
    client.Send(Post("/hold", ""));
    server.Held()->Break();
    EXPECT_EQ(client.ReadAll(), "");
    HttpClient other(server.port());
    other.Send(Post("/hold", ""));
    server.Held();  // and given up
    EXPECT_EQ(other.ReadAll(), "");
  }
  server.Stop();
  EXPECT_EQ(lost, 1);
  EXPECT_EQ(done, 1);
}

// As `nc -N` and socat do.
TEST(HttpServer, AClientThatHasSentAllGetsItsAnswers) {
  EchoServer server;
  HttpClient several(server.port());
  several.Send(Post("/hold", "") + Post("/echo", "second"));
  auto reply = server.Held();
  several.EndSending();
  EXPECT_EQ(several.ReadUntil(" "), "HTTP/1.1 ");  // it might have closed altogether
  reply->Send({.body = "first"});
  EXPECT_THAT(several.ReadAll(),
              AllOf(StartsWith("200 OK\r\n"), HasSubstr("firstHTTP/1.1 200"), EndsWith("|second")));

  HttpClient stream(server.port());
  stream.Send(Post("/hold", ""));
  reply = server.Held();
  reply->Begin({.filler = ":\n\n"});
  stream.ReadUntil("\r\n\r\n");
  stream.EndSending();
  EXPECT_EQ(stream.ReadUntil("\r\n:\n\n\r\n"), "3\r\n:\n\n\r\n");
  reply->Write("x");
  reply->End();
  EXPECT_EQ(stream.ReadAll(), "1\r\nx\r\n0\r\n\r\n");

  HttpClient old(server.port());
  old.Send("POST /hold HTTP/1.0\r\n\r\n");
  reply = server.Held();
  old.EndSending();
  EXPECT_EQ(old.ReadUntil(" "), "HTTP/1.1 ");
  reply->Send({.body = "old"});
  EXPECT_THAT(old.ReadAll(), AllOf(StartsWith("200 OK\r\n"), EndsWith("old")));
  EXPECT_EQ(server.closed, 0);

  HttpClient unfinished(server.port());
  unfinished.Send("GET /echo HTTP/1.1\r\n");
  unfinished.EndSending();
  EXPECT_EQ(unfinished.ReadAll(), "");
}

TEST(HttpServer, AClientThatHasClosedIsNoticedWhileItsAnswerIsToCome) {
  EchoServer server;
  int closed = 0;
  for (const char* version : {"HTTP/1.1", "HTTP/1.0"}) {
    for (const bool begun : {false, true}) {
      HttpClient client(server.port());
      client.Send(Str("POST /hold ", version, "\r\nHost: localhost\r\n\r\n"));
      const auto reply = server.Held();
      if (begun) reply->Begin({.filler = ":\n\n"});
      if (begun) client.ReadUntil("\r\n\r\n");
      client.Close();
      EXPECT_TRUE(server.WaitClosed(++closed));
    }
  }
}

TEST(HttpServer, WhoDoesNotReadIsCutOff) {
  EchoServer server({.stall_patience = milliseconds(200)});
  HttpClient client(server.port(), /*receive_buffer=*/4096);
  client.Send(Post("/hold", ""));
  const auto reply = server.Held();
  reply->Begin({});
  std::atomic<int> sent_pieces = 0, lost = 0;
  for (int i = 0; i < 100; ++i) {
    reply->Write(std::string(1 << 20, 'x'), [&](bool sent) { ++(sent ? sent_pieces : lost); });
  }
  EXPECT_TRUE(server.WaitClosed(1));
  ComesTrue([&] { return sent_pieces + lost >= 100; });
  EXPECT_EQ(sent_pieces + lost, 100);
  EXPECT_GT(lost, 50);
  // One that reads slowly is not.
  HttpClient slow(server.port(), /*receive_buffer=*/4096);
  slow.Send("GET /large HTTP/1.0\r\n\r\n");
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_GT(slow.ReadAll().size(), size_t{1} << 20);
}

TEST(HttpServer, ManyIdleConnectionsDelayNobody) {
  const EchoServer server;
  std::vector<std::unique_ptr<HttpClient>> idle;
  for (int i = 0; i < 400; ++i) idle.push_back(std::make_unique<HttpClient>(server.port()));
  HttpClient client(server.port());
  for (int i = 0; i < 100; ++i) {
    client.Send(Post("/echo", "x"));
    EXPECT_THAT(client.ReadAnswer(), EndsWith("|x"));
  }
  for (const auto& one : idle) {
    one->Send("GET /echo HTTP/1.0\r\n\r\n");
    EXPECT_THAT(one->ReadAll(), EndsWith("/echo|||"));
  }
}

TEST(HttpServer, StoppingDoesNotWaitForClients) {
  EchoServer server({.head_patience = std::chrono::hours(1)});
  HttpClient client(server.port());
  client.Send("GET / HTTP/1.1\r\nHost: localhost\r\n");
  server.Stop();
  EXPECT_EQ(client.ReadAll(), "");
}

}  // namespace
}  // namespace treadle
