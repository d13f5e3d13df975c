// The HTTP listener, over real sockets: what it answers, and what clients cannot do to it.
#include "server/http/http_listener.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace treadle {
namespace {

using std::chrono::milliseconds;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

class Client {
 public:
  explicit Client(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    timeval patience{.tv_sec = 60, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~Client() { close(fd_); }
  void Send(const std::string& text) {
    send(fd_, text.data(), text.size(), MSG_NOSIGNAL);  // it may be closed by now
  }
  // Until the other end closes.
  std::string ReadAll() {
    std::string all;
    char buffer[4096];
    for (ssize_t n; (n = recv(fd_, buffer, sizeof buffer, 0)) > 0;) all.append(buffer, n);
    return all;
  }
  bool connected() const { return connected_; }

 private:
  const int fd_;
  bool connected_ = false;
};

std::unique_ptr<HttpListener> Listen(const HttpListener::Options& options = {}) {
  auto listener = HttpListener::Start("127.0.0.1:0", options, [](const HttpRequest& request) {
    if (request.path == "/large") return HttpResponse{.body = std::string(1 << 20, 'x')};
    return HttpResponse{.body = request.path + "|" + request.authorization};
  });
  EXPECT_TRUE(listener.ok()) << listener.status();
  return *std::move(listener);
}

std::string Ask(int port, const std::string& text) {
  Client client(port);
  client.Send(text);
  return client.ReadAll();
}

TEST(HttpListener, AnswersOneRequest) {
  const auto listener = Listen();
  const std::string reply = Ask(listener->port(),
                                "GET /metrics?name=x HTTP/1.1\r\nHost: a\r\nAUTHORIZATION:  Bearer "
                                "k \r\nAccept: */*\r\n\r\n");
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(reply, HasSubstr("Content-Length: 17\r\n"));
  EXPECT_THAT(reply, EndsWith("\r\n\r\n/metrics|Bearer k"));
}

TEST(HttpListener, ALargeAnswerArrivesWhole) {
  const auto listener = Listen();
  EXPECT_GT(Ask(listener->port(), "GET /large HTTP/1.0\r\n\r\n").size(), size_t{1} << 20);
}

TEST(HttpListener, WhatIsNoRequestIsRefused) {
  const auto listener = Listen();
  EXPECT_THAT(Ask(listener->port(), "POST / HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 405"));
  EXPECT_THAT(Ask(listener->port(), "nonsense\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask(listener->port(), "GET /\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(Ask(listener->port(), "GET / HTTP/1.1\r\nX: " + std::string(10'000, 'x')),
              StartsWith("HTTP/1.1 431"));
}

TEST(HttpListener, ARequestThatComesInPiecesIsServed) {
  const auto listener = Listen();
  Client client(listener->port());
  for (const char c : std::string("GET /a HTTP/1.1\r\n\r\n")) client.Send(std::string(1, c));
  EXPECT_THAT(client.ReadAll(), EndsWith("/a|"));
}

TEST(HttpListener, AClientThatSaysNothingIsCutOff) {
  const auto listener = Listen({.patience = milliseconds(50)});
  Client client(listener->port());
  client.Send("GET / HT");
  EXPECT_EQ(client.ReadAll(), "");
}

TEST(HttpListener, SlowClientsKeepNobodyOut) {
  const auto listener = Listen({.patience = std::chrono::hours(1), .connections = 4});
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 40; ++i) {
    slow.push_back(std::make_unique<Client>(listener->port()));
    ASSERT_TRUE(slow.back()->connected());
    slow.back()->Send("GET / HTTP/1.1\r\n");
  }
  EXPECT_THAT(Ask(listener->port(), "GET /ok HTTP/1.1\r\n\r\n"), EndsWith("/ok|"));
  EXPECT_EQ(slow.front()->ReadAll(), "");  // made room
}

TEST(HttpListener, StoppingDoesNotWaitForClients) {
  auto listener = Listen({.patience = std::chrono::hours(1)});
  Client client(listener->port());
  client.Send("GET / HTTP/1.1\r\n");
  listener.reset();
  EXPECT_EQ(client.ReadAll(), "");
}

TEST(HttpListener, AnOccupiedAddressIsNamed) {
  const auto listener = Listen();
  const std::string address = "127.0.0.1:" + std::to_string(listener->port());
  const auto other = HttpListener::Start(address, {}, {});
  EXPECT_EQ(other.status().message(), "cannot listen on " + address + ": Address already in use");
}

}  // namespace
}  // namespace treadle
