#include "bench/load/http_response.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/ascii.h"
#include "base/number.h"
#include "base/status.h"

namespace treadle {
namespace {

constexpr size_t kMaxHead = 64 << 10;
constexpr size_t kMaxLine = 16 << 20;

std::string Shown(std::string_view text) { return std::string(text.substr(0, 80)); }

// Without the spaces around it, and in lower case.
std::string Plain(std::string_view text) {
  std::string plain(text);
  absl::StripAsciiWhitespace(&plain);
  absl::AsciiStrToLower(&plain);
  return plain;
}

}  // namespace

absl::StatusOr<size_t> HttpResponseParser::Feed(std::string_view bytes, const Body& body) {
  size_t at = 0;
  while (at < bytes.size() && state_ != State::kDone) {
    const std::string_view rest = bytes.substr(at);
    if (state_ == State::kLength || state_ == State::kChunk || state_ == State::kToEnd) {
      const size_t size = state_ == State::kToEnd
                              ? rest.size()
                              : static_cast<size_t>(std::min<uint64_t>(left_, rest.size()));
      body(rest.substr(0, size));
      at += size;
      left_ -= state_ == State::kToEnd ? 0 : size;
      if (state_ == State::kLength && left_ == 0) state_ = State::kDone;
      if (state_ == State::kChunk && left_ == 0) state_ = State::kChunkEnd;
      continue;
    }
    const size_t end = rest.find('\n');
    const size_t size = std::min(end, rest.size());
    line_.append(rest.substr(0, size));
    head_bytes_ += size;
    if (head_bytes_ > kMaxHead) return InvalidArgument("a head of more than ", kMaxHead, " bytes");
    at += size;
    if (end == rest.npos) break;
    ++at;
    if (line_.ends_with('\r')) line_.pop_back();
    TREADLE_RETURN_IF_ERROR(Line(line_));
    line_.clear();
  }
  return at;
}

absl::Status HttpResponseParser::End() {
  if (state_ == State::kToEnd) state_ = State::kDone;
  if (state_ == State::kDone) return absl::OkStatus();
  return InvalidArgument("the server ended the connection before its answer was whole");
}

absl::Status HttpResponseParser::Line(std::string_view line) {
  switch (state_) {
    case State::kStatusLine:
      return StatusLine(line);
    case State::kHeaders:
      if (!line.empty()) return Header(line);
      HeadersEnd();
      return absl::OkStatus();
    case State::kChunkSize: {
      const auto [stop, error] =
          std::from_chars(line.data(), line.data() + line.size(), left_, /*base=*/16);
      if (error != std::errc() || (stop != line.data() + line.size() && *stop != ';')) {
        return InvalidArgument("a chunk's size is '", Shown(line), "', expected hexadecimal");
      }
      head_bytes_ = 0;
      state_ = left_ == 0 ? State::kTrailers : State::kChunk;
      return absl::OkStatus();
    }
    case State::kChunkEnd:
      if (!line.empty()) return InvalidArgument("a chunk is longer than its size says");
      state_ = State::kChunkSize;
      return absl::OkStatus();
    default:  // kTrailers
      if (line.empty()) state_ = State::kDone;
      return absl::OkStatus();
  }
}

absl::Status HttpResponseParser::StatusLine(std::string_view line) {
  const auto status = NumberIn<int>(line.size() >= 12 ? line.substr(9, 3) : "");
  if (!line.starts_with("HTTP/1.") || line.size() < 9 || line[8] != ' ' || !status) {
    return InvalidArgument("the answer begins with '", Shown(line), "', expected HTTP/1.1 NNN");
  }
  status_ = *status;
  keep_alive_ = line[7] != '0';
  state_ = State::kHeaders;
  return absl::OkStatus();
}

absl::Status HttpResponseParser::Header(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == line.npos)
    return InvalidArgument("a header is '", Shown(line), "', without a colon");
  const std::string name = Plain(line.substr(0, colon));
  const std::string value = Plain(line.substr(colon + 1));
  if (name == "transfer-encoding") {
    if (value != "chunked") {
      return InvalidArgument("transfer-encoding is '", Shown(value), "', expected chunked");
    }
    chunked_ = true;
  }
  if (name == "connection") keep_alive_ = value != "close";
  if (name == "content-length") {
    const auto length = NumberIn<uint64_t>(value);
    if (!length) return InvalidArgument("content-length is '", Shown(value), "', no number");
    left_ = *length;
    has_length_ = true;
  }
  return absl::OkStatus();
}

void HttpResponseParser::HeadersEnd() {
  head_bytes_ = 0;
  if (status_ < 200) {
    *this = HttpResponseParser();
  } else if (status_ == 204 || status_ == 304) {
    state_ = State::kDone;
  } else if (chunked_) {
    state_ = State::kChunkSize;
  } else if (has_length_) {
    state_ = left_ == 0 ? State::kDone : State::kLength;
  } else {
    keep_alive_ = false;
    state_ = State::kToEnd;
  }
}

absl::Status EventStreamParser::Feed(std::string_view bytes,
                                     const std::function<void(std::string_view)>& event) {
  while (!bytes.empty()) {
    if (after_cr_ && bytes[0] == '\n') bytes.remove_prefix(1);
    after_cr_ = false;
    const size_t end = bytes.find_first_of("\r\n");
    line_.append(bytes.substr(0, end));
    if (line_.size() + data_.size() > kMaxLine) {
      return InvalidArgument("an event of more than ", kMaxLine, " bytes");
    }
    if (end == bytes.npos) break;
    after_cr_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    if (line_.empty()) {
      if (has_data_) event(data_);
      data_.clear();
      has_data_ = false;
    } else if (line_ == "data" || line_.starts_with("data:")) {
      if (has_data_) data_ += '\n';
      const size_t colon = std::min<size_t>(5, line_.size());
      data_.append(line_, colon + (line_.compare(colon, 1, " ") == 0 ? 1 : 0));
      has_data_ = true;
    }
    line_.clear();
  }
  return absl::OkStatus();
}

}  // namespace treadle
