#include "net/http2_guard.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

using Frame = Http2Frames::Frame;

constexpr uint8_t kGoAway = 7;
constexpr uint32_t kNoError = 0, kProtocolError = 1, kCancel = 8, kEnhanceYourCalm = 11;

uint32_t ReadU32(const uint8_t* bytes) {
  return static_cast<uint32_t>(bytes[0]) << 24 | static_cast<uint32_t>(bytes[1]) << 16 |
         static_cast<uint32_t>(bytes[2]) << 8 | bytes[3];
}

void AppendU32(std::string& out, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift);
}

void AppendFrame(std::string& out, uint8_t type, uint8_t flags, uint32_t stream,
                 std::string_view payload) {
  const auto size = static_cast<uint32_t>(payload.size());
  AppendU32(out, size << 8 | type);
  out += static_cast<char>(flags);
  AppendU32(out, stream);
  out += payload;
}

std::string U32(uint32_t value) {
  std::string out;
  AppendU32(out, value);
  return out;
}

// HPACK (RFC 7541): a string as it is, without Huffman's code.
void AppendString(std::string& out, std::string_view text) {
  if (text.size() < 127) {
    out += static_cast<char>(text.size());
  } else {
    out += '\x7f';
    size_t rest = text.size() - 127;
    for (; rest >= 128; rest /= 128) out += static_cast<char>(128 + rest % 128);
    out += static_cast<char>(rest);
  }
  out += text;
}

// A field that neither side remembers: HPACK's state stays the server's.
void AppendField(std::string& out, std::string_view name, std::string_view value) {
  out += '\0';
  AppendString(out, name);
  AppendString(out, value);
}

// gRPC over HTTP/2: the status of a call in its trailers; alone where nothing was answered yet.
std::string Trailers(bool answered, absl::StatusCode code, std::string_view reason) {
  std::string out;
  if (!answered) {
    out += '\x88';  // HPACK's eighth field: ":status" is "200"
    AppendField(out, "content-type", "application/grpc");
  }
  AppendField(out, "grpc-status", Str(static_cast<int>(code)));
  AppendField(out, "grpc-message", reason);  // printable ASCII without '%': nothing to escape
  return out;
}

}  // namespace

std::string Http2Guard::Limits::Named(std::string_view flag) const {
  return flags ? Str(" (", flag, ")") : "";
}

Http2Frames::Piece Http2Frames::Next(std::string_view& bytes) {
  Piece piece;
  piece.header = left_ == 0;
  const size_t wanted = piece.header ? kHeaderBytes - have_ : left_;
  piece.bytes = bytes.substr(0, wanted);
  bytes.remove_prefix(piece.bytes.size());
  if (piece.header) {
    std::ranges::copy(piece.bytes, header_.begin() + static_cast<std::ptrdiff_t>(have_));
    have_ += piece.bytes.size();
    if (have_ < kHeaderBytes) return piece;
    have_ = 0;
    piece.begins = true;
    frame_ = {.length = ReadU32(header_.data()) >> 8,
              .type = header_[3],
              .flags = header_[4],
              .stream = ReadU32(header_.data() + 5) & 0x7fffffff};
    left_ = frame_.length;
    if (frame_.type == kHeaders || frame_.type == kContinuation || frame_.type == kPushPromise) {
      in_block_ = !frame_.Has(kEndHeaders);
    }
  } else {
    left_ -= static_cast<uint32_t>(piece.bytes.size());
  }
  piece.ends = left_ == 0;
  return piece;
}

absl::StatusOr<size_t> Http2Guard::FromClient(std::string_view bytes, std::string& to_server,
                                              std::string& to_client, size_t calls, TimePoint now) {
  const size_t size = bytes.size();
  begun_ = 0;
  if (!greeted()) {
    const std::string_view piece = bytes.substr(0, kPreface.size() - preface_);
    if (piece != kPreface.substr(preface_, piece.size())) {
      return InvalidArgument("expected HTTP/2: this port speaks gRPC");
    }
    preface_ += piece.size();
    to_server += piece;
    bytes.remove_prefix(piece.size());
  }
  while (!bytes.empty() && (begun_ < calls || !client_.between())) {
    const Http2Frames::Piece piece = client_.Next(bytes);
    if (piece.begins) TREADLE_RETURN_IF_ERROR(Begin(client_.frame(), now));
    to_server += piece.bytes;
    if (!piece.header) TakeData(piece.bytes);
    Insert(to_server, to_client);
  }
  return size - bytes.size();
}

absl::Status Http2Guard::Begin(const Frame& frame, TimePoint now) {
  data_left_ = 0;
  switch (frame.type) {
    case Http2Frames::kHeaders:
      block_ = 0;
      if (streams_.size() >= limits_.streams && !streams_.contains(frame.stream)) {
        return ResourceExhausted("more than ", limits_.streams, " open calls on one connection",
                                 limits_.Named("--max-calls-per-connection"));
      }
      if (const auto [stream, begins] = streams_.try_emplace(frame.stream); true) {
        stream->second.ended = frame.Has(Http2Frames::kEndStream);
        begun_ += begins;
        unanswered_ += begins;
      }
      [[fallthrough]];
    case Http2Frames::kContinuation:
      block_ += Http2Frames::kHeaderBytes + frame.length;
      if (block_ > limits_.header_block_bytes) {
        return ResourceExhausted("a header block of more than ", limits_.header_block_bytes,
                                 " bytes", limits_.Named("--max-header-bytes"));
      }
      break;
    case Http2Frames::kReset:
      if (const auto stream = streams_.find(frame.stream); stream != streams_.end()) {
        GiveUp(stream);
      }
      break;
    case Http2Frames::kData:
      pad_length_ = frame.Has(Http2Frames::kPadded);
      data_left_ = frame.length;
      if (const auto stream = streams_.find(frame.stream); stream != streams_.end()) {
        stream->second.ended |= frame.Has(Http2Frames::kEndStream);
      }
      break;
    case Http2Frames::kPing:
      if (frame.Has(Http2Frames::kAck)) break;
      pings_.Add(1, now);
      // In gRPC's words: its clients know them, and send fewer.
      if (pings_.At(now) > kMaxPings) return ResourceExhausted("too_many_pings");
      break;
    default:
      break;
  }
  return absl::OkStatus();
}

void Http2Guard::TakeData(std::string_view bytes) {
  if (data_left_ == 0) return;
  if (pad_length_) {
    pad_length_ = false;
    const uint32_t padding = 1u + static_cast<uint8_t>(bytes[0]);
    data_left_ -= std::min(data_left_, padding);
    bytes.remove_prefix(1);
  }
  bytes = bytes.substr(0, data_left_);
  data_left_ -= static_cast<uint32_t>(bytes.size());
  const auto stream = streams_.find(client_.frame().stream);
  if (stream != streams_.end()) TakeMessages(stream, bytes);
}

void Http2Guard::TakeMessages(Streams::iterator at, std::string_view bytes) {
  Stream& stream = at->second;
  while (!bytes.empty()) {
    if (stream.left == 0) {
      stream.prefix[stream.have++] = static_cast<uint8_t>(bytes[0]);
      bytes.remove_prefix(1);
      if (stream.have < stream.prefix.size()) continue;
      stream.have = 0;
      stream.left = ReadU32(stream.prefix.data() + 1);
      if ((stream.prefix[0] & 1) != 0) {
        return Refuse(at, CallRefusal::kCompressed,
                      "compressed messages are not accepted: send them without grpc-encoding");
      }
      const bool first = limits_.first_message_bytes > 0 && !stream.heard;
      const uint64_t most = first ? limits_.first_message_bytes : limits_.message_bytes;
      if (stream.left > most) {
        return Refuse(
            at, CallRefusal::kTooLong,
            Str("a ", first ? "first " : "", "message of ", stream.left, " bytes, at most ", most,
                " are accepted", limits_.Named("--max-request-bytes")));
      }
      stream.heard |= stream.left == 0;
      continue;
    }
    const uint64_t taken = std::min<uint64_t>(stream.left, bytes.size());
    bytes.remove_prefix(taken);
    stream.left -= taken;
    stream.got += taken;
    held_ += taken;
    if (stream.left == 0) {
      held_ -= stream.got;
      stream.got = 0;
      stream.heard = true;
    }
  }
}

void Http2Guard::Refuse(Streams::iterator stream, CallRefusal why, std::string_view reason) {
  constexpr absl::StatusCode kCodes[] = {
      absl::StatusCode::kUnimplemented, absl::StatusCode::kResourceExhausted,
      absl::StatusCode::kResourceExhausted, absl::StatusCode::kDeadlineExceeded};
  if (refused_) refused_(why);
  const uint32_t id = stream->first;
  AppendFrame(insert_to_client_, Http2Frames::kHeaders,
              Http2Frames::kEndHeaders | Http2Frames::kEndStream, id,
              Trailers(stream->second.answered, kCodes[static_cast<size_t>(why)], reason));
  AppendFrame(insert_to_client_, Http2Frames::kReset, 0, id, U32(kNoError));
  AppendFrame(insert_to_server_, Http2Frames::kReset, 0, id, U32(kCancel));
  GiveUp(stream);
}

void Http2Guard::GiveUp(Streams::iterator stream) {
  given_up_ += !stream->second.answered;
  Forget(stream);
}

void Http2Guard::Forget(Streams::iterator stream) {
  held_ -= stream->second.got;
  unanswered_ -= !stream->second.answered;
  streams_.erase(stream);
}

bool Http2Guard::RefuseLargest(std::string_view reason, std::string& to_server,
                               std::string& to_client) {
  const auto largest =
      std::ranges::max_element(streams_, {}, [](const auto& stream) { return stream.second.got; });
  if (largest == streams_.end() || !client_.between()) return false;
  Refuse(largest, CallRefusal::kNoRoom, reason);
  Insert(to_server, to_client);
  return true;
}

bool Http2Guard::RefuseUnfinished(TimePoint begun, std::string& to_server, std::string& to_client) {
  const auto unfinished = [&](const auto& stream) {
    const bool enough = limits_.first_message_bytes > 0 && stream.second.heard;
    return !stream.second.ended && !enough && stream.second.begun < begun;
  };
  for (auto at = std::ranges::find_if(streams_, unfinished); at != streams_.end();
       at = std::ranges::find_if(streams_, unfinished)) {
    if (!client_.between()) return false;
    Refuse(at, CallRefusal::kLate, "the request did not come to its end in time");
  }
  Insert(to_server, to_client);
  return true;
}

void Http2Guard::Insert(std::string& to_server, std::string& to_client) {
  if (client_.between()) {
    to_server += insert_to_server_;
    insert_to_server_.clear();
  }
  if (server_.between()) {
    to_client += insert_to_client_;
    insert_to_client_.clear();
  }
}

void Http2Guard::FromServer(std::string_view bytes, std::string& to_client) {
  while (!bytes.empty()) {
    const Http2Frames::Piece piece = server_.Next(bytes);
    to_client += piece.bytes;
    if (piece.begins) {
      const Frame& frame = server_.frame();
      const auto stream = streams_.find(frame.stream);
      const bool data = frame.type == Http2Frames::kHeaders || frame.type == Http2Frames::kData;
      if (data) pings_.Clear();
      if (stream != streams_.end()) {
        if (frame.type == Http2Frames::kHeaders) {
          unanswered_ -= !std::exchange(stream->second.answered, true);
        }
        if (frame.type == Http2Frames::kReset || (data && frame.Has(Http2Frames::kEndStream))) {
          Forget(stream);
        }
      }
    }
    if (server_.between()) {
      to_client += insert_to_client_;
      insert_to_client_.clear();
    }
  }
}

std::string Http2Guard::GoAway(const absl::Status& reason) const {
  std::string out;
  if (!server_.between()) return out;
  const uint32_t code = absl::IsInvalidArgument(reason) ? kProtocolError : kEnhanceYourCalm;
  AppendFrame(out, kGoAway, 0, 0, U32(0x7fffffff) + U32(code) + std::string(reason.message()));
  return out;
}

}  // namespace treadle
