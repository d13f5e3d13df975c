// Limits on what one client's HTTP/2 connection costs a gRPC server, held before the server sees
// it.
//
// gRPC keeps a header block until it ends and a message until it is whole, and inflates a
// compressed one, before it looks at any limit. So the frames are read on their way (RFC 9113,
// section 4; gRPC's messages within DATA: a byte of flags and four of length before each): a header
// block, the streams of a connection and the length that a message announces are limited here, and
// compressed messages are refused. So are PING frames that come faster than clients need them to
// keep a connection open, by which gRPC's own limit is replaced: that is one in five minutes, while
// gateways ask every ten seconds. Everything else goes through as it came. A refused call is
// answered in the server's place, with a status that says why, and the server is told that its
// client has cancelled it.
//
// Thread safety: none.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

// A count of what is forgotten at so many a second.
class Forgotten {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit Forgotten(double a_second) : a_second_(a_second) {}
  void Add(double count, TimePoint now) {
    count_ = At(now) + count;
    then_ = now;
  }
  void Clear() { count_ = 0; }
  double At(TimePoint now) const {
    return std::max(0.0, count_ - a_second_ * std::chrono::duration<double>(now - then_).count());
  }

 private:
  double a_second_;
  double count_ = 0;
  TimePoint then_{};
};

// The frames of one direction: where each begins and ends, while the bytes come in any pieces.
class Http2Frames {
 public:
  enum Type : uint8_t {
    kData = 0,
    kHeaders = 1,
    kReset = 3,
    kPushPromise = 5,
    kPing = 6,
    kContinuation = 9
  };
  enum Flag : uint8_t { kEndStream = 1, kAck = 1, kEndHeaders = 4, kPadded = 8 };
  static constexpr size_t kHeaderBytes = 9;

  struct Frame {
    uint32_t length = 0;
    uint8_t type = 0;
    uint8_t flags = 0;
    uint32_t stream = 0;

    bool Has(Flag flag) const { return (flags & flag) != 0; }
  };

  // Takes what `bytes` begins with, and removes it: a piece of a frame's header, or, once that is
  // whole, a piece of its payload.
  struct Piece {
    std::string_view bytes;
    bool header = false;  // bytes are of the frame's header
    bool begins = false;  // the header is whole with them
    bool ends = false;    // the frame is whole with them
  };
  Piece Next(std::string_view& bytes);

  const Frame& frame() const { return frame_; }  // of the last header that was whole
  // Nothing of a frame, nor of a header block of several, has come in without its end.
  bool between() const { return have_ == 0 && left_ == 0 && !in_block_; }

 private:
  std::array<uint8_t, kHeaderBytes> header_{};
  size_t have_ = 0;    // bytes of a header that is not whole yet
  uint32_t left_ = 0;  // of the payload
  bool in_block_ = false;
  Frame frame_;
};

// Why a guard ends one call. The order is that of Door::Counts::refused.
enum class CallRefusal : uint8_t { kCompressed, kTooLong, kNoRoom, kLate };

class Http2Guard {
 public:
  struct Limits {
    uint64_t message_bytes = 4 << 20;     // as the message says of itself
    uint64_t header_block_bytes = 65536;  // of a HEADERS frame and what continues it
    size_t streams = 256;                 // that are open at once
    // The limit of each call's first message, which has to come in time where the others may follow
    // whenever they like; 0: a call is one request, whose end has to come in time.
    uint64_t first_message_bytes = 0;
    bool flags = true;  // serve's, which errors name
    // " (flag)", for an error; "" if there is none.
    std::string Named(std::string_view flag) const;
    bool operator==(const Limits&) const = default;
  };

  // PING frames that a client may send at once, and one more each so often; any number of times
  // where the server has sent headers or data between, since clients measure with them then.
  static constexpr int kMaxPings = 10;
  static constexpr std::chrono::seconds kPingInterval{4};  // less than a client's five

  using TimePoint = std::chrono::steady_clock::time_point;

  // `refused` is told of each call that the guard ends.
  explicit Http2Guard(const Limits& limits, std::function<void(CallRefusal)> refused = {})
      : limits_(limits), refused_(std::move(refused)) {}

  // Bytes of the client, in pieces of any size. Appends to `to_server` what the server may see and
  // to `to_client` what the client must be told. Gives how many bytes it has taken: all, unless so
  // many `calls` have begun with them; the rest must come again. ResourceExhausted or
  // InvalidArgument: the connection must end (GoAway), and what was limited.
  absl::StatusOr<size_t> FromClient(std::string_view bytes, std::string& to_server,
                                    std::string& to_client, size_t calls = SIZE_MAX,
                                    TimePoint now = std::chrono::steady_clock::now());
  // Bytes of the server, likewise; they all go to the client.
  void FromServer(std::string_view bytes, std::string& to_client);

  // The client speaks HTTP/2: its preface is there, whole.
  bool greeted() const { return preface_ == kPreface.size(); }
  size_t streams() const { return streams_.size(); }
  // Calls so far that were given up, by their client or here, before the server had answered.
  uint64_t given_up() const { return given_up_; }
  size_t unanswered() const { return unanswered_; }
  // Bytes that the server keeps of messages that are not whole.
  uint64_t held() const { return held_; }
  // Ends the call that keeps the most of them: ResourceExhausted, with `reason`. False: the client
  // stands within a frame, so the server cannot be told now, and the connection must end.
  bool RefuseLargest(std::string_view reason, std::string& to_server, std::string& to_client);

  // Ends the calls that began before `begun` and whose request has not ended yet, or, where first
  // messages have a limit, whose first message has not: DeadlineExceeded.
  // False as RefuseLargest.
  bool RefuseUnfinished(TimePoint begun, std::string& to_server, std::string& to_client);

  // The frame that ends a connection with `reason`, for the client; empty where it would lie within
  // another frame.
  std::string GoAway(const absl::Status& reason) const;

 private:
  struct Stream {
    std::array<uint8_t, 5> prefix{};  // of the message that comes in
    size_t have = 0;                  // bytes of it
    uint64_t left = 0;                // of the message
    uint64_t got = 0;                 // of the message
    bool heard = false;               // its first message is whole
    bool answered = false;            // the server has sent its headers
    bool ended = false;               // by the client
    TimePoint begun = std::chrono::steady_clock::now();
  };
  using Streams = std::map<uint32_t, Stream>;

  static constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

  absl::Status Begin(const Http2Frames::Frame& frame, TimePoint now);
  void TakeData(std::string_view bytes);
  void TakeMessages(Streams::iterator stream, std::string_view bytes);
  void Refuse(Streams::iterator stream, CallRefusal why, std::string_view reason);
  void GiveUp(Streams::iterator stream);
  void Forget(Streams::iterator stream);
  void Insert(std::string& to_server, std::string& to_client);

  const Limits limits_;
  const std::function<void(CallRefusal)> refused_;  // may be empty
  size_t preface_ = 0;                              // bytes of it that have come
  Http2Frames client_, server_;
  uint64_t block_ = 0;       // bytes of the header block that comes in
  uint32_t data_left_ = 0;   // of the DATA frame that comes in, without padding
  bool pad_length_ = false;  // its first byte, the length of its padding, comes next
  Streams streams_;
  uint64_t held_ = 0;
  size_t begun_ = 0;       // calls, with the bytes that come in
  size_t unanswered_ = 0;  // of streams_
  uint64_t given_up_ = 0;
  Forgotten pings_{1.0 / kPingInterval.count()};
  std::string insert_to_server_, insert_to_client_;  // wait for a frame's end
};

}  // namespace treadle
