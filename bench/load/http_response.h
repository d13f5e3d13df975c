// Answers of HTTP/1.1 servers as their bytes come, and the server-sent events in their bodies.
//
// Bytes may be cut anywhere. What a server may send is bounded: a head of 64 KiB, a line or an
// event of 16 MiB. Thread safety: none; plain values.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

// The answer to one request: status line, headers, and a body of a stated length, in chunks, or up
// to the end of the connection (RFC 9112, section 6.3). Interim answers (1xx) are passed over.
class HttpResponseParser {
 public:
  using Body = std::function<void(std::string_view bytes)>;

  // Takes a part of `bytes`, gives to `body` what is the body's, and returns how many bytes it has
  // taken; fewer than all only when the answer is whole. InvalidArgument says what is wrong.
  absl::StatusOr<size_t> Feed(std::string_view bytes, const Body& body);
  // The connection has ended: InvalidArgument unless the answer is whole by that.
  absl::Status End();

  bool begun() const { return !line_.empty() || state_ != State::kStatusLine; }
  bool done() const { return state_ == State::kDone; }
  int status() const { return status_; }  // 0: not known yet
  // Whether the connection may carry another request once this is done.
  bool keep_alive() const { return keep_alive_; }

 private:
  enum class State {
    kStatusLine,
    kHeaders,
    kLength,     // of the stated length
    kChunkSize,  // a line
    kChunk,
    kChunkEnd,  // an empty line
    kTrailers,
    kToEnd,
    kDone
  };
  absl::Status Line(std::string_view line);
  absl::Status StatusLine(std::string_view line);
  absl::Status Header(std::string_view line);
  void HeadersEnd();

  State state_ = State::kStatusLine;
  std::string line_;  // its beginning
  size_t head_bytes_ = 0;
  int status_ = 0;
  bool keep_alive_ = true;
  bool chunked_ = false;
  bool has_length_ = false;
  uint64_t left_ = 0;  // of the body, or of the chunk
};

// The events of a body of type text/event-stream (WHATWG HTML, "Server-sent events"): only their
// data, whose lines are joined by '\n'.
class EventStreamParser {
 public:
  // InvalidArgument: a line or an event is too long.
  absl::Status Feed(std::string_view bytes, const std::function<void(std::string_view)>& event);

 private:
  std::string line_;
  std::string data_;
  bool has_data_ = false;
  bool after_cr_ = false;  // a '\n' that follows belongs to the line's end before it
};

}  // namespace treadle
