// Http2Guard: what comes out does not depend on how the bytes were cut, and what it counts is
// within its limits.
#include "net/http2_guard.h"

#include "base/status.h"
#include "tests/attacks/hostile_client.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

enum Action { kFrame, kServerFrame, kBytes, kServerBytes, kRefuseLargest, kRefuseAll, kActions };

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

struct Passed {
  absl::Status status;
  std::string to_server, to_client, farewell;
  uint64_t held = 0;
  size_t streams = 0;
  bool operator==(const Passed&) const = default;
};

// Bytes go in pieces of `cut`.
Passed Pass(std::string_view bytes, size_t cut) {
  FuzzInput input(bytes);
  const Http2Guard::Limits limits = {.message_bytes = input.Byte(),
                                     .header_block_bytes = 9u + input.Byte(),
                                     .streams = 1 + input.Choose(8)};
  Http2Guard guard(limits);
  Passed passed;
  bool stands = true;
  const auto check = [&] {
    TREADLE_CHECK(guard.streams() <= limits.streams);
    TREADLE_CHECK(guard.held() <= guard.streams() * limits.message_bytes);
  };
  const auto from_client = [&](std::string_view piece) {
    for (; !piece.empty() && stands; piece.remove_prefix(std::min(cut, piece.size()))) {
      passed.status =
          guard.FromClient(piece.substr(0, cut), passed.to_server, passed.to_client).status();
      stands = passed.status.ok();
      check();
    }
  };
  const auto from_server = [&](std::string_view piece) {
    for (; !piece.empty(); piece.remove_prefix(std::min(cut, piece.size()))) {
      guard.FromServer(piece.substr(0, cut), passed.to_client);
    }
  };
  const auto frame = [&] {
    const uint8_t type = input.Byte(), flags = input.Byte(), stream = input.Byte();
    return Http2Frame(type, flags, stream % 16, std::string(input.Short()));
  };
  if (input.Byte() % 8 != 0) from_client(kPreface);
  while (!input.empty() && stands) {
    switch (input.Choose(kActions)) {
      case kFrame:
        from_client(frame());
        break;
      case kServerFrame:
        from_server(frame());
        break;
      case kBytes:
        from_client(input.Short());
        break;
      case kServerBytes:
        from_server(input.Short());
        break;
      case kRefuseLargest:
        stands = guard.RefuseLargest("too much", passed.to_server, passed.to_client) ||
                 guard.streams() == 0;
        break;
      default:
        stands = guard.RefuseUnfinished(Http2Guard::TimePoint::max(), passed.to_server,
                                        passed.to_client);
    }
    check();
  }
  passed.held = guard.held();
  passed.streams = guard.streams();
  passed.farewell = guard.GoAway(passed.status);
  return passed;
}

void Run(std::string_view input) {
  const Passed whole = Pass(input, SIZE_MAX);
  for (const size_t cut : {1, 7}) {
    Passed pieces = Pass(input, cut);
    // A preface or frame ends the connection, and its beginning may have gone through
    // before.
    if (!whole.status.ok() && pieces.to_server.starts_with(whole.to_server) &&
        pieces.to_server.size() - whole.to_server.size() < kPreface.size()) {
      pieces.to_server = whole.to_server;
    }
    TREADLE_CHECK(pieces == whole);
  }
}

std::vector<std::string> Seeds() {
  const auto frame = [](Action action, int type, int flags, int stream,
                        const std::string& payload) {
    std::string seed;
    for (const int byte : {int{action}, type, flags, stream, static_cast<int>(payload.size())}) {
      seed += static_cast<char>(byte);
    }
    return seed + payload;
  };
  const std::string begin = "\x40\xff\x03\x01";
  const std::string call = frame(kFrame, 1, 4, 1, "headers");
  const std::string message = MessagePrefix(false, 20) + std::string(20, 'm');
  return {begin + call + frame(kFrame, 0, 1, 1, message) + frame(kServerFrame, 1, 4, 1, "h") +
              frame(kServerFrame, 0, 0, 1, "answer") + frame(kServerFrame, 1, 5, 1, "end"),
          begin + frame(kFrame, 1, 0, 1, "headers") + frame(kFrame, 9, 4, 1, "more") +
              frame(kFrame, 0, 8, 1, "\3" + message + "pad") + frame(kFrame, 3, 0, 1, "abcd"),
          begin + call + frame(kFrame, 0, 0, 1, message.substr(0, 9)) + static_cast<char>(kBytes) +
              "\x02" + "ab" + static_cast<char>(kServerBytes) + "\x03" + "abc" +
              static_cast<char>(kRefuseLargest) + static_cast<char>(kRefuseAll),
          begin + call + frame(kFrame, 0, 0, 1, message.substr(0, 9)) +
              static_cast<char>(kRefuseLargest) + call + static_cast<char>(kRefuseAll),
          begin + call + frame(kFrame, 0, 0, 1, MessagePrefix(true, 5)) +
              frame(kFrame, 1, 4, 3, "h") + frame(kFrame, 0, 0, 3, MessagePrefix(false, 1 << 20))};
}

}  // namespace

// A few frames of at most 255 bytes.
const FuzzTarget kHttp2GuardTarget = {"http2_guard", 2048, Seeds, Run};

}  // namespace treadle
