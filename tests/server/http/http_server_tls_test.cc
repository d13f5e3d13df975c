// The HTTP server over TLS: whom it serves, whom it does not, what clients cannot do to it, and
// that what rotates its files fails nobody.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <future>
#include <random>
#include <thread>

#include "base/status.h"
#include "base/sync.h"
#include "server/access/tls_files.h"
#include "server/http/http_server.h"
#include "tests/server/http/tls_client.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr size_t kLarge = 16 << 20;  // more than the kernel takes at once
const char kRequest[] = "GET /ok HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

class Lines {
 public:
  LogSink log() {
    return [this](const LogEvent& event) {
      MutexLock lock(mutex_);
      all_.push_back(event.message);
    };
  }
  int Count(const std::string& text) {
    MutexLock lock(mutex_);
    return static_cast<int>(std::count_if(all_.begin(), all_.end(), [&](const std::string& line) {
      return line.find(text) != std::string::npos;
    }));
  }
  bool WaitFor(const std::string& text, int times = 1) {
    return ComesTrue([&] { return Count(text) >= times; });
  }

 private:
  Mutex mutex_;
  std::vector<std::string> all_ ABSL_GUARDED_BY(mutex_);
};

// A listener with files of its own, which Rotate writes anew.
class Server {
 public:
  explicit Server(const PemPair& pair, const std::string& client_ca = "",
                  HttpOptions options = {}) {
    files_ = {.certificate = TestPath("crt"), .key = TestPath("key"), .ca = {}};
    Rotate(pair);
    if (!client_ca.empty()) {
      files_.ca = TestPath("ca");
      WriteText(files_.ca, client_ca);
    }
    auto tls = OpenSocketTls(files_, "http/1.1", lines_.log());
    EXPECT_TRUE(tls.ok()) << tls.status();
    tls_ = *std::move(tls);
    options.tls = tls_.get();
    const auto answer = [](const HttpRequest& request, const auto& reply) {
      const bool large = request.path == "/large";
      reply->Send({.body = large ? std::string(kLarge, 'x')
                                 : Str(request.path, "|", request.Header("authorization"))});
    };
    auto server =
        HttpServer::Start("127.0.0.1:0", options,
                          {{"GET", "/ok", answer},
                           {"GET", "/a", answer},
                           {"GET", "/large", answer},
                           {"GET", "/hold", [this](const HttpRequest&, const auto& reply) {
                              reply->OnClosed([this] { closed_.set_value(); });
                              held_.set_value(reply);
                            }}});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  void Rotate(const PemPair& pair) const {
    WriteText(files_.key, pair.key);
    WriteText(files_.certificate, pair.certificate);
  }
  void Stop() { server_.reset(); }
  int port() const { return server_->address().port; }
  const TlsFiles& files() const { return files_; }
  Lines& lines() { return lines_; }
  // The reply to "/hold", once; and that its client went away before it had that.
  std::shared_ptr<HttpReply> Held() { return held_.get_future().get(); }
  bool WaitClosed() {
    return closed_.get_future().wait_for(std::chrono::minutes(1)) == std::future_status::ready;
  }

 private:
  TlsFiles files_;
  Lines lines_;
  std::promise<std::shared_ptr<HttpReply>> held_;
  std::promise<void> closed_;
  std::shared_ptr<const SocketTls> tls_;
  std::unique_ptr<HttpServer> server_;
};

TEST(HttpServerTls, ServesNewVersionsAndSaysWhereTheAnswerEnds) {
  const TestCa ca;
  const Server server(ca.Sign());
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    const TlsClientOptions options{.ca = ca.pem(), .version = version};
    const std::string reply = HttpsGet(server.port(), options, "/a", "Authorization: Bearer k\r\n");
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
    EXPECT_THAT(reply, EndsWith("\r\n\r\n/a|Bearer k"));
    EXPECT_GT(HttpsGet(server.port(), options, "/large").size(), kLarge);
  }
}

TEST(HttpServerTls, ServesTheWholeChain) {
  const TestCa ca;
  const Server server(ca.SignThroughAnother());
  EXPECT_THAT(HttpsGet(server.port(), {.ca = ca.pem()}, "/ok"), EndsWith("/ok|"));
}

TEST(HttpServerTls, OlderVersionsAndPlaintextAreRefused) {
  const TestCa ca;
  const Server server(ca.Sign());
  for (const int version : {TLS1_VERSION, TLS1_1_VERSION}) {
    TlsClient old(server.port(), {.ca = ca.pem(), .version = version});
    EXPECT_FALSE(old.Handshake());
    EXPECT_THAT(old.error(), HasSubstr("alert protocol version"));
  }
  TlsClient plain(server.port(), {});
  plain.SendRaw(kRequest);
  EXPECT_THAT(plain.ReadRaw(), Not(HasSubstr("HTTP/")));
  const TestCa other;
  std::string error;
  EXPECT_EQ(HttpsGet(server.port(), {.ca = other.pem()}, "/ok", "", &error), "");
  EXPECT_EQ(error, "certificate verify failed");  // the client's own
  EXPECT_THAT(HttpsGet(server.port(), {.ca = ca.pem()}, "/ok"), EndsWith("/ok|"));
}

TEST(HttpServerTls, MutualTlsWantsACertificateOfItsCaThatIsValid) {
  const TestCa ca, clients, other;
  const Server server(ca.Sign(), clients.pem());
  struct Case {
    const char* what;
    PemPair own;
    std::string reason;  // empty: served
  };
  const Case cases[] = {
      {"its CA", clients.Sign(), ""},
      {"none", {}, "alert"},
      {"another CA", other.Sign(), "alert unknown ca"},
      {"the server's CA", ca.Sign(), "alert unknown ca"},
      {"expired", clients.Sign(-7200, -3600), "alert certificate expired"},
  };
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    for (const Case& row : cases) {
      std::string error;
      const std::string reply = HttpsGet(
          server.port(), {.ca = ca.pem(), .own = row.own, .version = version}, "/ok", "", &error);
      if (row.reason.empty()) {
        EXPECT_THAT(reply, EndsWith("/ok|")) << row.what << ": " << error;
      } else {
        EXPECT_EQ(reply, "") << row.what;
        EXPECT_THAT(error, HasSubstr(row.reason)) << row.what;
      }
    }
  }
}

TEST(HttpServerTls, BytesMayComeOneByOne) {
  const TestCa ca;
  const Server server(ca.Sign(), ca.pem());
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    EXPECT_THAT(HttpsGet(server.port(),
                         {.ca = ca.pem(), .own = ca.Sign(), .version = version, .piece = 1}, "/ok"),
                EndsWith("/ok|"));
  }
  // And many records at once: one for each byte, all sent before the first is read.
  TlsClient client(server.port(), {.ca = ca.pem(), .own = ca.Sign()});
  ASSERT_TRUE(client.Handshake());
  for (const char c : std::string(kRequest)) client.Send(std::string(1, c));
  EXPECT_THAT(client.ReadAll(), EndsWith("/ok|"));
}

TEST(HttpServerTls, AHeadThatNeverEndsIsRefused) {
  const TestCa ca;
  const Server server(ca.Sign());
  EXPECT_THAT(HttpsGet(server.port(), {.ca = ca.pem()}, "/", "X: " + std::string(60'000, 'x')),
              StartsWith("HTTP/1.1 431"));
}

// How far a client that is slow may have come.
void Dawdle(TlsClient& client, int how) {
  if (how == 0) return;
  if (how == 1) return client.SendPartOfHello(0.5);
  if (how == 2) return client.SendPartOfHello(1);
  EXPECT_TRUE(client.Handshake());
  if (how == 4) client.Send("GET / HT");
}

TEST(HttpServerTls, ASlowClientIsCutOffWhereverItStops) {
  const TestCa ca;
  // Long enough for a handshake on a loaded machine: the last two must come so far.
  const Server server(ca.Sign(), "", {.head_patience = milliseconds(3'000)});
  std::vector<std::unique_ptr<TlsClient>> slow;
  for (int how = 0; how < 5; ++how) {
    slow.push_back(std::make_unique<TlsClient>(server.port(), TlsClientOptions{.ca = ca.pem()}));
    Dawdle(*slow.back(), how);
  }
  for (const auto& client : slow) {
    EXPECT_THAT(client->ReadRaw(), AllOf(Not(HasSubstr("HTTP/")), Not(HasSubstr("no end"))));
  }
}

TEST(HttpServerTls, SlowClientsKeepNobodyOut) {
  const TestCa ca;
  const Server server(ca.Sign(), "", {.connections = 4, .head_patience = std::chrono::hours(1)});
  std::vector<std::unique_ptr<TlsClient>> slow;
  for (int i = 0; i < 40; ++i) {
    slow.push_back(std::make_unique<TlsClient>(server.port(), TlsClientOptions{.ca = ca.pem()}));
    Dawdle(*slow.back(), i % 5);
  }
  EXPECT_THAT(HttpsGet(server.port(), {.ca = ca.pem()}, "/ok"), EndsWith("/ok|"));
  EXPECT_EQ(slow.front()->ReadRaw(), "");  // made room
}

TEST(HttpServerTls, StoppingDoesNotWaitForClients) {
  const TestCa ca;
  Server server(ca.Sign(), "", {.head_patience = std::chrono::hours(1)});
  TlsClient half(server.port(), {.ca = ca.pem()});
  half.SendPartOfHello(0.5);
  TlsClient open(server.port(), {.ca = ca.pem()});
  ASSERT_TRUE(open.Handshake());
  server.Stop();
  EXPECT_EQ(half.ReadRaw(), "");
  EXPECT_EQ(open.ReadRaw(), "");
}

TEST(HttpServerTls, WhoGoesAwayHarmsNobody) {
  const TestCa ca;
  const Server server(ca.Sign());
  for (int i = 0; i < 50; ++i) {
    TlsClient client(server.port(), {.ca = ca.pem()});
    ASSERT_TRUE(client.Handshake());
    client.Send("GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n");
    client.Reset();  // a write into this raises SIGPIPE
  }
  EXPECT_THAT(HttpsGet(server.port(), {.ca = ca.pem()}, "/ok"), EndsWith("/ok|"));
}

TEST(HttpServerTls, AClientThatHasSentAllGetsItsAnswerAndOneThatIsGoneIsNoticed) {
  const TestCa ca;
  for (const int version : {TLS1_2_VERSION, TLS1_3_VERSION}) {
    for (const bool gone : {false, true}) {
      Server server(ca.Sign());
      auto client = std::make_unique<TlsClient>(
          server.port(), TlsClientOptions{.ca = ca.pem(), .version = version});
      ASSERT_TRUE(client->Handshake());
      client->Send("GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n");
      const auto reply = server.Held();
      client->EndSending();
      if (gone) {
        client.reset();
        EXPECT_TRUE(server.WaitClosed());
        continue;
      }
      // Once its end was seen.
      EXPECT_EQ(client->ReadUntil(" "), "HTTP/1.1 ");
      reply->Send({.body = "late"});
      EXPECT_THAT(client->ReadAll(), AllOf(StartsWith("200 OK\r\n"), EndsWith("late")));
    }
  }
}

TEST(HttpServerTls, WhatIsNoTlsIsSurvived) {
  const TestCa ca;
  const Server server(ca.Sign());
  std::mt19937 random(20260101);
  for (int i = 0; i < 200; ++i) {
    std::string noise(1 + random() % 600, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    if (i % 2 == 0) noise.replace(0, std::min<size_t>(5, noise.size()), "\x16\x03\x01\x02\x00", 5);
    TlsClient client(server.port(), {.ca = ca.pem()});
    if (i % 3 == 0) client.SendPartOfHello(1);
    client.SendRaw(noise);
    if (i % 5 == 0) client.Reset();
  }
  EXPECT_THAT(HttpsGet(server.port(), {.ca = ca.pem()}, "/ok"), EndsWith("/ok|"));
}

TEST(HttpServerTls, ABrokenConnectionIsNoOtherOnesError) {
  const TestCa ca;
  const Server server(ca.Sign());
  TlsClient good(server.port(), {.ca = ca.pem(), .piece = 1});
  ASSERT_TRUE(good.Handshake());
  TlsClient bad(server.port(), {.ca = ca.pem()});
  bad.SendRaw("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
  bad.ReadRaw();  // it has failed
  good.Send(kRequest);
  EXPECT_THAT(good.ReadAll(), EndsWith("/ok|"));
}

TEST(HttpServerTls, ARotatedPairIsTakenOverUnderLoadWithoutAFailure) {
  const TestCa ca, other;
  Server server(ca.Sign());
  // It began under the old pair, and ends under it.
  TlsClient kept(server.port(), {.ca = ca.pem()});
  ASSERT_TRUE(kept.Handshake());
  const long old_serial = kept.serial();
  std::atomic<bool> over = false;
  int asked = 0;
  std::vector<std::string> failures;
  std::thread load([&] {
    while (!over) {
      std::string error;
      if (HttpsGet(server.port(), {.ca = ca.pem()}, "/ok", "", &error).empty()) {
        failures.push_back(error);
      }
      ++asked;
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  const auto serial = [&] {
    TlsClient client(server.port(), {.ca = ca.pem()});
    return client.Handshake() ? client.serial() : -1;
  };

  server.Rotate(ca.Sign());
  EXPECT_TRUE(server.lines().WaitFor("TLS: read " + server.files().certificate + " anew"));
  const long new_serial = serial();
  EXPECT_GT(new_serial, old_serial);
  kept.Send(kRequest);
  EXPECT_THAT(kept.ReadAll(), EndsWith("/ok|"));

  // A pair that does not pass is said once, and not taken over. Between its two files the rotation
  // itself may have been seen.
  const std::string mismatch = "does not belong to the certificate";
  const std::string kept_old = "what was there stays in use";
  const int mismatches = server.lines().Count(mismatch);
  const int kept_before = server.lines().Count(kept_old);
  WriteText(server.files().certificate, ca.Sign(-7200, -3600).certificate);
  EXPECT_TRUE(server.lines().WaitFor("has expired on"));
  WriteText(server.files().certificate, other.Sign().certificate);
  EXPECT_TRUE(server.lines().WaitFor(mismatch, mismatches + 1));
  ASSERT_EQ(std::remove(server.files().key.c_str()), 0);
  EXPECT_TRUE(server.lines().WaitFor("cannot read " + server.files().key));
  std::this_thread::sleep_for(milliseconds(2'200));  // two more looks at the same
  EXPECT_EQ(server.lines().Count("has expired on"), 1);
  EXPECT_EQ(server.lines().Count(mismatch), mismatches + 1);
  EXPECT_EQ(server.lines().Count("cannot read " + server.files().key), 1);
  EXPECT_EQ(server.lines().Count(kept_old), kept_before + 3);
  EXPECT_EQ(serial(), new_serial);
  over = true;
  load.join();
  EXPECT_GT(asked, 0);
  EXPECT_THAT(failures, testing::IsEmpty());
}

TEST(HttpServerTls, ARotatedClientCaIsTakenOver) {
  const TestCa ca, before, after;
  Server server(ca.Sign(), before.pem());
  const PemPair early = before.Sign(), late = after.Sign();
  const auto served = [&](const PemPair& own) {
    return !HttpsGet(server.port(), {.ca = ca.pem(), .own = own}, "/ok").empty();
  };
  EXPECT_TRUE(served(early));
  EXPECT_FALSE(served(late));
  WriteText(server.files().ca, after.pem());
  EXPECT_TRUE(server.lines().WaitFor("anew"));
  EXPECT_FALSE(served(early));
  EXPECT_TRUE(served(late));
}

TEST(HttpServerTls, WhatIsWrongAtTheStartIsNamed) {
  const TestCa ca;
  const PemPair pair = ca.Sign();
  const std::string crt = TestPath("crt"), key = TestPath("key");
  const auto open = [&](const std::string& certificate, const std::string& its_key) {
    WriteText(crt, certificate);
    WriteText(key, its_key);
    const auto tls = OpenSocketTls({.certificate = crt, .key = key, .ca = {}}, "http/1.1", {});
    return std::string(tls.status().message());
  };
  EXPECT_EQ(open(pair.certificate, pair.key), "");
  EXPECT_THAT(open(pair.certificate, ca.Sign().key), HasSubstr("does not belong to"));
  EXPECT_THAT(open(ca.Sign(-7200, -3600).certificate, pair.key), HasSubstr("has expired on"));
  const PemPair weak = ca.SignWeak();
  EXPECT_THAT(open(weak.certificate, weak.key),
              HasSubstr("OpenSSL does not take the certificate in " + crt + ": ee key too small"));
  EXPECT_THAT(open("nonsense", pair.key), HasSubstr(crt + " has no certificate, expected PEM"));
}

}  // namespace
}  // namespace treadle
