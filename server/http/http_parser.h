// One request of HTTP/1, while its bytes come in, by the letter of RFC 9112. A proxy in front of
// the server may read the same bytes; what it could take for another request, or for two, is
// refused:
//   - Lines end with CR LF; no other control character but a tab, no folded line, no space before a
//     colon.
//   - One Content-Length of digits alone, or `Transfer-Encoding: chunked` in HTTP/1.1; never both.
//   - One Host that is a name or an address (HTTP/1.0 may do without), one Origin at most, one
//     Authorization at most.
// Fields after the last chunk are read and forgotten, and so are empty lines before a request.
// Where the request line names a host (its absolute form), that stands in the place of Host.
//
// Thread safety: none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/http/http_server.h"

namespace treadle {

class HttpParser {
 public:
  // At most `head_bytes` in the head, and around a chunk; at most `body_bytes` in the body.
  HttpParser(size_t head_bytes, uint64_t body_bytes)
      : head_bytes_(head_bytes), body_bytes_(body_bytes) {}

  struct Refusal {
    int code;
    std::string message;
  };
  // Takes what `bytes` begins with, up to the end of the request, and removes it. A refusal: what
  // follows has no meaning. It does not depend on how the bytes are cut.
  std::optional<Refusal> Take(std::string& bytes);

  bool begun() const { return part_ > kRequestLine; }  // has its first line
  bool has_head() const { return part_ > kFields; }
  bool whole() const { return part_ == kWhole; }
  size_t body_bytes() const { return request_.body.size(); }  // that have come

  // REQUIRES: has_head().
  unsigned version() const { return version_; }  // 10 or 11
  bool keep_alive() const { return keep_alive_; }
  bool expects_continue() const;
  const std::string& method() const { return method_; }
  // The request without peer and arrival. REQUIRES: whole().
  HttpRequest Release() { return std::move(request_); }

 private:
  enum Part { kRequestLine, kFields, kBody, kChunkLine, kChunk, kChunkEnd, kTrailers, kWhole };

  // The next line, or nothing yet.
  std::optional<Refusal> TakeLine(std::string_view& rest, std::optional<std::string_view>& line);
  void TakeBody(std::string_view& rest);
  std::optional<Refusal> Read(std::string_view line);
  std::optional<Refusal> ReadRequestLine(std::string_view line);
  std::optional<Refusal> ReadField(std::string_view line);
  std::optional<Refusal> EndHead();
  std::optional<Refusal> ReadChunkLine(std::string_view line);
  const std::string* Find(const std::string& name) const;  // null: there is no such field
  Refusal BodyTooLong() const;

  const size_t head_bytes_;
  const uint64_t body_bytes_;

  Part part_ = kRequestLine;
  size_t searched_ = 0;  // bytes of an unfinished line that hold no end of it
  size_t section_ = 0;   // bytes of lines since the request, or the chunk, began
  uint64_t left_ = 0;    // bytes of the body, or the chunk, that are to come
  unsigned version_ = 0;
  bool keep_alive_ = false;
  std::string method_;
  std::optional<std::string> authority_;  // host and port in the request line
  HttpRequest request_;
};

}  // namespace treadle
