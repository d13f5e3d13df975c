// Frames in any pieces, and what is refused where.
#include "net/http2_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/attacks/hostile_client.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const std::string kSettings = Http2Frame(4, 0, 0, "");

std::string Call(uint32_t stream) { return Http2Frame(1, 4, stream, CallHeaders("/a/B")); }
std::string Message(uint32_t length, bool compressed = false) {
  return MessagePrefix(compressed, length) + std::string(length, 'm');
}

struct Passed {
  absl::Status status;
  std::string to_server, to_client;
  uint64_t held = 0;
  size_t streams = 0;

  bool operator==(const Passed& other) const {
    return status == other.status && to_server == other.to_server && to_client == other.to_client &&
           held == other.held && streams == other.streams;
  }
};

// In pieces of at most `most` bytes, of a random size.
Passed Pass(const std::string& bytes, const Http2Guard::Limits& limits, size_t most,
            std::mt19937& random) {
  Http2Guard guard(limits);
  Passed passed;
  std::string_view rest = bytes;
  while (!rest.empty() && passed.status.ok()) {
    const size_t size = std::uniform_int_distribution<size_t>(1, most)(random);
    passed.status =
        guard.FromClient(rest.substr(0, size), passed.to_server, passed.to_client).status();
    rest.remove_prefix(std::min(size, rest.size()));
  }
  passed.held = guard.held();
  passed.streams = guard.streams();
  return passed;
}

Passed Whole(const std::string& bytes, const Http2Guard::Limits& limits = {}) {
  std::mt19937 random(1);
  return Pass(bytes, limits, bytes.size(), random);
}

TEST(Http2Guard, PassesWhatIsAllowedAsItCame) {
  const std::string padded = std::string(1, '\3') + Message(10) + "pad";
  const std::string bytes = kPreface + kSettings + Call(1) + Http2Frame(0, 0, 1, Message(100)) +
                            Http2Frame(0, 8, 1, padded) + Call(3) +
                            Http2Frame(0, 1, 3, Message(0) + Message(7)) +
                            Http2Frame(6, 0, 0, "12345678");
  const Passed passed = Whole(bytes);
  EXPECT_TRUE(passed.status.ok());
  EXPECT_EQ(passed.to_server, bytes);
  EXPECT_THAT(passed.to_client, IsEmpty());
  EXPECT_EQ(passed.streams, 2u);
  EXPECT_EQ(passed.held, 0u);
}

TEST(Http2Guard, PiecesDoNotMatter) {
  std::mt19937 random(7);
  std::string bytes = kPreface + kSettings;
  for (uint32_t stream = 1; stream < 40; stream += 2) {
    bytes += Http2Frame(1, 0, stream, CallHeaders("/a/B")) + Http2Frame(9, 4, stream, "more");
    const uint32_t length = std::uniform_int_distribution<uint32_t>(0, 300)(random);
    const std::string message = Message(length, stream % 7 == 0);
    bytes += Http2Frame(0, 0, stream, message.substr(0, message.size() / 2));
    if (stream % 3 != 0) bytes += Http2Frame(0, 1, stream, message.substr(message.size() / 2));
    if (stream % 5 == 0) bytes += Http2Frame(3, 0, stream, "abcd");
  }
  const Http2Guard::Limits limits = {.message_bytes = 200};
  const Passed whole = Whole(bytes, limits);
  EXPECT_GT(whole.held, 0u);
  EXPECT_THAT(whole.to_client, HasSubstr("--max-request-bytes"));
  for (const size_t most : {1u, 3u, 20u, 500u}) {
    EXPECT_TRUE(Pass(bytes, limits, most, random) == whole) << most;
  }
}

TEST(Http2Guard, ARefusedCallIsAnsweredAndCancelledAtFrameEnds) {
  const std::string before = kPreface + Call(1);
  const std::string data = Http2Frame(0, 0, 1, Message(11));
  Http2Guard guard({.message_bytes = 10});
  std::string to_server, to_client;
  // The server stands within a frame of its own.
  const std::string answer = Http2Frame(0, 0, 5, "answer");
  guard.FromServer(std::string_view(answer).substr(0, 11), to_client);
  ASSERT_TRUE(guard.FromClient(before + data.substr(0, 15), to_server, to_client).ok());
  EXPECT_EQ(to_server, before + data.substr(0, 15));
  EXPECT_EQ(to_client, answer.substr(0, 11));
  ASSERT_TRUE(guard.FromClient(data.substr(15), to_server, to_client).ok());
  EXPECT_EQ(to_server, before + data + Http2Frame(3, 0, 1, std::string("\0\0\0\x8", 4)));
  guard.FromServer(std::string_view(answer).substr(11), to_client);
  EXPECT_THAT(to_client, testing::StartsWith(answer));
  EXPECT_THAT(to_client, HasSubstr("a message of 11 bytes, at most 10 are accepted"));
  EXPECT_THAT(to_client, testing::EndsWith(Http2Frame(3, 0, 1, std::string(4, '\0'))));
  EXPECT_EQ(guard.streams(), 0u);
}

TEST(Http2Guard, TheServersEndForgetsACall) {
  Http2Guard guard({});
  std::string to_server, to_client;
  ASSERT_TRUE(guard.FromClient(kPreface + Call(1) + Call(3) + Call(5), to_server, to_client).ok());
  guard.FromServer(Http2Frame(1, 4, 1, "h") + Http2Frame(0, 0, 1, "d"), to_client);
  EXPECT_EQ(guard.streams(), 3u);
  guard.FromServer(Http2Frame(1, 5, 1, "t") + Http2Frame(3, 0, 3, "abcd"), to_client);
  EXPECT_EQ(guard.streams(), 1u);
}

TEST(Http2Guard, WhatAConnectionMayNotDoEndsIt) {
  const auto message = [](const std::string& bytes, const Http2Guard::Limits& limits) {
    return std::string(Whole(bytes, limits).status.message());
  };
  EXPECT_THAT(message("GET / HTTP/1.1\r\n", {}), HasSubstr("expected HTTP/2"));
  const std::string block = Http2Frame(1, 0, 1, std::string(90, 'h'));
  EXPECT_THAT(message(kPreface + block + Http2Frame(9, 0, 1, ""), {.header_block_bytes = 107}),
              HasSubstr("--max-header-bytes"));
  EXPECT_EQ(message(kPreface + block + Http2Frame(9, 4, 1, ""), {.header_block_bytes = 108}), "");
  EXPECT_THAT(message(kPreface + Call(1) + Call(3) + Call(5), {.streams = 2}),
              HasSubstr("--max-calls-per-connection"));
  EXPECT_EQ(message(kPreface + Call(1) + Call(3) + Call(3), {.streams = 2}), "");
}

const std::string kPing = Http2Frame(6, 0, 0, "12345678");

// During a call that is not answered, and without one; gateways send them every ten seconds.
TEST(Http2Guard, PingsKeepAConnectionAndDoNotFloodIt) {
  std::string to_server, to_client;
  auto now = Http2Guard::TimePoint() + std::chrono::hours(1);
  for (const std::string& call : {std::string(), Call(1)}) {
    for (const bool server_sends : {false, true}) {
      Http2Guard guard({});
      ASSERT_TRUE(guard.FromClient(kPreface + call, to_server, to_client).ok());
      const auto ping = [&] {
        return guard.FromClient(kPing, to_server, to_client, SIZE_MAX, now).status();
      };
      for (int i = 0; i < 1000; ++i) {
        now += std::chrono::seconds(5);
        ASSERT_EQ(ping(), absl::OkStatus()) << i;
      }
      for (int i = 0; i < 5; ++i) ASSERT_EQ(ping(), absl::OkStatus());
      if (server_sends) guard.FromServer(Http2Frame(1, 4, 1, "h"), to_client);
      for (int i = 0; i < 100; ++i) {  // the answers to the server's own
        ASSERT_TRUE(guard.FromClient(Http2Frame(6, 1, 0, "12345678"), to_server, to_client).ok());
      }
      int more = 0;
      absl::Status last;
      while ((last = ping()).ok() && more < 100) ++more;
      EXPECT_EQ(more, server_sends ? 10 : 4);
      EXPECT_EQ(last.message(), "too_many_pings");
      EXPECT_THAT(guard.GoAway(last), HasSubstr("too_many_pings"));
    }
  }
}

TEST(Http2Guard, FirstMessagesHaveALimitAndATimeOfTheirOwn) {
  Http2Guard guard({.message_bytes = 100, .first_message_bytes = 10, .flags = false});
  std::string to_server, to_client;
  const std::string bytes = kPreface + Call(1) + Http2Frame(0, 0, 1, Message(10) + Message(99)) +
                            Call(3) + Http2Frame(0, 0, 3, Message(0) + Message(99));
  ASSERT_TRUE(guard.FromClient(bytes, to_server, to_client).ok());
  EXPECT_THAT(to_client, IsEmpty());
  const std::string large = Call(5) + Http2Frame(0, 0, 5, MessagePrefix(false, 11));
  ASSERT_TRUE(guard.FromClient(large + Call(7), to_server, to_client).ok());
  EXPECT_THAT(to_client, HasSubstr("a first message of 11 bytes, at most 10 are accepted"));
  EXPECT_THAT(to_client, testing::Not(HasSubstr("--")));
  EXPECT_EQ(guard.streams(), 3u);
  const auto now = std::chrono::steady_clock::now();
  EXPECT_TRUE(guard.RefuseUnfinished(now + std::chrono::hours(1), to_server, to_client));
  EXPECT_EQ(guard.streams(), 2u);  // not those that have said something
  const std::string later = Http2Frame(0, 0, 1, Message(101));
  ASSERT_TRUE(guard.FromClient(later, to_server, to_client).ok());
  EXPECT_THAT(to_client, HasSubstr("a message of 101 bytes, at most 100 are accepted"));
}

TEST(Http2Guard, TheLargestUnfinishedMessageGivesWay) {
  Http2Guard guard({});
  std::string to_server, to_client;
  std::string bytes = kPreface;
  for (const uint32_t stream : {1u, 3u, 5u}) {
    const std::string part = Message(1000).substr(0, stream == 3 ? 900 : 100);
    bytes += Call(stream) + Http2Frame(0, 0, stream, part);
  }
  ASSERT_TRUE(guard.FromClient(bytes, to_server, to_client).ok());
  EXPECT_EQ(guard.held(), 900u + 100 + 100 - 15);
  EXPECT_TRUE(guard.RefuseLargest("too much", to_server, to_client));
  EXPECT_EQ(guard.held(), 100u + 100 - 10);
  EXPECT_EQ(to_server, bytes + Http2Frame(3, 0, 3, std::string("\0\0\0\x8", 4)));
  EXPECT_THAT(to_client, HasSubstr("too much"));
  // Within a frame the server cannot be told.
  ASSERT_TRUE(guard.FromClient(Http2Frame(0, 0, 1, "x").substr(0, 4), to_server, to_client).ok());
  EXPECT_FALSE(guard.RefuseLargest("too much", to_server, to_client));
}

TEST(Http2Guard, ARequestThatDoesNotEndIsEnded) {
  Http2Guard guard({});
  std::string to_server, to_client;
  const std::string bytes = kPreface + Call(1) + Http2Frame(0, 0, 1, Message(5)) + Call(3) +
                            Http2Frame(0, 1, 3, Message(5)) +
                            Http2Frame(1, 5, 5, CallHeaders("/a/B"));
  ASSERT_TRUE(guard.FromClient(bytes, to_server, to_client).ok());
  const auto now = std::chrono::steady_clock::now();
  EXPECT_TRUE(guard.RefuseUnfinished(now - std::chrono::minutes(1), to_server, to_client));
  EXPECT_EQ(guard.streams(), 3u);
  EXPECT_TRUE(guard.RefuseUnfinished(now + std::chrono::minutes(1), to_server, to_client));
  EXPECT_EQ(guard.streams(), 2u);
  EXPECT_EQ(to_server, bytes + Http2Frame(3, 0, 1, std::string("\0\0\0\x8", 4)));
  EXPECT_THAT(to_client, HasSubstr("did not come to its end"));
}

}  // namespace
}  // namespace treadle
