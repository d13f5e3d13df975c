#include "server/http/http_parser.h"

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "base/status.h"

namespace treadle {
namespace {

using Refusal = HttpParser::Refusal;

// Fields of which a second one is refused; the lines of others are joined (RFC 9110, section 5.3).
constexpr std::string_view kOnce[] = {"authorization", "content-length", "host", "origin"};

Refusal Bad(const std::string& expected) {
  return {400, "expected an HTTP/1 request: " + expected};
}

bool IsDigit(char c) { return absl::ascii_isdigit(static_cast<unsigned char>(c)); }
bool IsSpace(char c) { return c == ' ' || c == '\t'; }
bool IsControl(char c) { return c != '\t' && absl::ascii_iscntrl(static_cast<unsigned char>(c)); }
bool IsVisible(char c) { return absl::ascii_isgraph(static_cast<unsigned char>(c)); }

// Whether each byte is a letter, a digit or one of `marks`, and there is one.
bool IsWord(std::string_view text, std::string_view marks) {
  return !text.empty() && std::ranges::all_of(text, [&](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || marks.find(c) != marks.npos;
  });
}
bool IsToken(std::string_view text) { return IsWord(text, "!#$%&'*+-.^_`|~"); }

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  absl::AsciiStrToLower(&lower);
  return lower;
}

// The elements of a list, in lower case.
std::vector<std::string> Elements(std::string_view list) {
  std::vector<std::string> elements;
  while (true) {
    const size_t comma = list.find(',');
    elements.push_back(Lower(Trimmed(list.substr(0, comma))));
    if (comma == list.npos) return elements;
    list.remove_prefix(comma + 1);
  }
}

// uri-host [ ":" port ] (RFC 9110, section 7.2), without the commas and the like that RFC 3986
// allows in a name: no host has them, and two fields that were joined would.
bool IsHost(std::string_view text) {
  const bool bracketed = text.starts_with('[');
  const size_t end = std::min(text.find(bracketed ? ']' : ':'), text.size());
  const std::string_view name = text.substr(bracketed ? 1 : 0, end - (bracketed ? 1 : 0));
  if (bracketed && end == text.size()) return false;
  const std::string_view port = text.substr(bracketed ? end + 1 : end);
  return IsWord(name, bracketed ? "-._~%:" : "-._~%") &&
         (port.empty() || (port[0] == ':' && std::ranges::all_of(port.substr(1), IsDigit)));
}

// *( BWS ";" BWS token [ BWS "=" BWS ( token / quoted-string ) ] ) (RFC 9112, section 7.1.1)
bool IsChunkExtension(std::string_view text) {
  const auto skip = [](std::string_view& from, char c) {
    from.remove_prefix(std::min(from.find_first_not_of(" \t"), from.size()));
    const bool there = from.starts_with(c);
    if (there) from.remove_prefix(1);
    return there;
  };
  const auto skip_token = [&](std::string_view& from) {
    from.remove_prefix(std::min(from.find_first_not_of(" \t"), from.size()));
    const auto end = std::ranges::find_if_not(from, [](char c) { return IsToken({&c, 1}); });
    const auto size = static_cast<size_t>(end - from.begin());
    from.remove_prefix(size);
    return size > 0;
  };
  while (!text.empty()) {
    if (!skip(text, ';') || !skip_token(text)) return false;
    std::string_view value = text;
    if (!skip(value, '=')) continue;
    if (skip(value, '"')) {
      while (!value.empty() && value.front() != '"') {
        value.remove_prefix(std::min<size_t>(value.front() == '\\' ? 2 : 1, value.size()));
      }
      if (!skip(value, '"')) return false;
    } else if (!skip_token(value)) {
      return false;
    }
    text = value;
  }
  return true;
}

// With the bytes that %XX stand for.
std::string Unescaped(std::string_view path) {
  std::string text;
  for (size_t i = 0; i < path.size(); ++i) {
    int byte = 0;
    const char* const digits = path.data() + i + 1;
    if (path[i] == '%' && i + 2 < path.size() &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      text += static_cast<char>(byte);
      i += 2;
    } else {
      text += path[i];
    }
  }
  return text;
}

}  // namespace

std::optional<Refusal> HttpParser::Take(std::string& bytes) {
  std::string_view rest = bytes;
  std::optional<Refusal> refusal;
  while (!refusal && !whole() && !rest.empty()) {
    if (part_ == kBody || part_ == kChunk) {
      TakeBody(rest);
      continue;
    }
    std::optional<std::string_view> line;
    refusal = TakeLine(rest, line);
    if (!line) break;
    refusal = Read(*line);
  }
  bytes.erase(0, bytes.size() - rest.size());
  return refusal;
}

std::optional<Refusal> HttpParser::TakeLine(std::string_view& rest,
                                            std::optional<std::string_view>& line) {
  const auto unseen = rest.substr(searched_);
  const auto control = std::ranges::find_if(unseen, IsControl);
  const size_t end = searched_ + static_cast<size_t>(control - unseen.begin());
  if (section_ + end > head_bytes_) {
    if (part_ <= kFields) {
      return Refusal{431, Str("the request's head is longer than ", head_bytes_, " bytes")};
    }
    return Bad(Str("the line before a chunk is longer than ", head_bytes_, " bytes"));
  }
  const std::string_view tail = rest.substr(end, 2);
  if (tail.empty() || tail == "\r") {
    searched_ = end;
    return std::nullopt;
  }
  if (tail != "\r\n") return Bad("a line has a control character before its CR LF");
  line = rest.substr(0, end);
  rest.remove_prefix(end + 2);
  section_ += end + 2;
  searched_ = 0;
  return std::nullopt;
}

void HttpParser::TakeBody(std::string_view& rest) {
  const size_t count = std::min<uint64_t>(left_, rest.size());
  request_.body += rest.substr(0, count);
  rest.remove_prefix(count);
  left_ -= count;
  if (left_ == 0) part_ = part_ == kBody ? kWhole : kChunkEnd;
}

std::optional<Refusal> HttpParser::Read(std::string_view line) {
  switch (part_) {
    case kRequestLine:
      if (line.empty()) return std::nullopt;  // RFC 9112, section 2.2
      return ReadRequestLine(line);
    case kFields:
      return line.empty() ? EndHead() : ReadField(line);
    case kChunkEnd:
      if (!line.empty()) return Bad("a chunk is longer than its size");
      part_ = kChunkLine;
      section_ = 0;
      return std::nullopt;
    case kChunkLine:
      return ReadChunkLine(line);
    default:  // kTrailers
      if (!line.empty()) return ReadField(line);
      part_ = kWhole;
      return std::nullopt;
  }
}

std::optional<Refusal> HttpParser::ReadRequestLine(std::string_view line) {
  const size_t first = line.find(' '), last = line.rfind(' ');
  const std::string_view method = line.substr(0, first);
  const std::string_view version = last == line.npos ? "" : line.substr(last + 1);
  if (first == last || !IsToken(method) || (version != "HTTP/1.1" && version != "HTTP/1.0")) {
    return Bad("the first line is not 'METHOD /path HTTP/1.1'");
  }
  std::string_view target = line.substr(first + 1, last - first - 1);
  if (target.empty() || !std::ranges::all_of(target, IsVisible)) {
    return Bad("the path has a byte that is not visible ASCII");
  }
  method_ = method;
  version_ = version == "HTTP/1.1" ? 11 : 10;
  // The absolute form (RFC 9112, section 3.2.2).
  const size_t scheme = std::min(target.find("://"), target.size());
  if (const std::string name = Lower(target.substr(0, scheme)); name == "http" || name == "https") {
    target.remove_prefix(std::min(scheme + 3, target.size()));
    const size_t end = std::min(target.find_first_of("/?"), target.size());
    authority_ = target.substr(0, end);
    target.remove_prefix(end);
  }
  if (const size_t mark = target.find('?'); mark != target.npos) {
    request_.query = target.substr(mark + 1);
    target = target.substr(0, mark);
  }
  request_.path = Unescaped(authority_ && target.empty() ? "/" : target);
  part_ = kFields;
  return std::nullopt;
}

std::optional<Refusal> HttpParser::ReadField(std::string_view line) {
  const size_t colon = line.find(':');
  if (colon == line.npos || !IsToken(line.substr(0, colon))) {
    return Bad("a line of the head is not 'Name: value'");
  }
  const std::string name = Lower(line.substr(0, colon));
  if (part_ == kTrailers) {
    if (name != "content-length" && name != "transfer-encoding") return std::nullopt;
    return Bad("the header " + name + " comes after the body");
  }
  const std::string value(Trimmed(line.substr(colon + 1)));
  const auto [field, added] = request_.headers.try_emplace(name, value);
  if (added) return std::nullopt;
  if (std::ranges::find(kOnce, name) != std::end(kOnce)) {
    return Bad("the header " + name + " comes twice");
  }
  field->second += ", " + value;
  return std::nullopt;
}

std::optional<Refusal> HttpParser::EndHead() {
  const std::string* const host = Find("host");
  if (host == nullptr ? version_ > 10 : !IsHost(*host)) {
    return Bad("the header Host is missing, or no name or address with or without a port");
  }
  if (authority_ && !IsHost(*authority_)) {
    return Bad("the first line has a URL without a host that is a name or address");
  }
  if (authority_) request_.headers["host"] = *authority_;
  const std::string* const connection = Find("connection");
  const std::vector<std::string> options = Elements(connection == nullptr ? "" : *connection);
  const auto has = [&](std::string_view option) {
    return std::ranges::find(options, option) != options.end();
  };
  keep_alive_ = !has("close") && (version_ > 10 || has("keep-alive"));

  // The body's length: RFC 9112, sections 6.1 to 6.3.
  const std::string* const length = Find("content-length");
  if (const std::string* const coding = Find("transfer-encoding"); coding != nullptr) {
    if (version_ < 11) return Bad("the header Transfer-Encoding comes with HTTP/1.0");
    if (length != nullptr) return Bad("Transfer-Encoding and Content-Length come together");
    const std::vector<std::string> codings = Elements(*coding);
    if (codings.back() != "chunked" || std::ranges::count(codings, "chunked") > 1) {
      return Bad("the header Transfer-Encoding is not 'chunked'");
    }
    if (codings.size() > 1) {
      return Refusal{501,
                     "the header Transfer-Encoding has a coding that is not known here, "
                     "expected 'chunked' alone"};
    }
    part_ = kChunkLine;
    section_ = 0;
    return std::nullopt;
  }
  if (length != nullptr) {
    if (length->empty() || !std::ranges::all_of(*length, IsDigit)) {
      return Bad("the header Content-Length is not a number");
    }
    const auto read = std::from_chars(length->data(), length->data() + length->size(), left_);
    if (read.ec != std::errc() || left_ > body_bytes_) return BodyTooLong();
  }
  part_ = left_ > 0 ? kBody : kWhole;
  return std::nullopt;
}

std::optional<Refusal> HttpParser::ReadChunkLine(std::string_view line) {
  const char* const end = line.data() + line.size();
  const auto [after, error] = std::from_chars(line.data(), end, left_, 16);
  if (error == std::errc::invalid_argument ||
      !IsChunkExtension({after, static_cast<size_t>(end - after)})) {
    return Bad("the line before a chunk is not its size in hexadecimal digits");
  }
  if (error != std::errc() || left_ > body_bytes_ - request_.body.size()) return BodyTooLong();
  part_ = left_ > 0 ? kChunk : kTrailers;
  return std::nullopt;
}

bool HttpParser::expects_continue() const {
  const std::string* const expect = Find("expect");
  return version_ > 10 && expect != nullptr && Lower(*expect) == "100-continue";
}

const std::string* HttpParser::Find(const std::string& name) const {
  const auto found = request_.headers.find(name);
  return found == request_.headers.end() ? nullptr : &found->second;
}

Refusal HttpParser::BodyTooLong() const {
  return {413,
          Str("the request's body is longer than ", body_bytes_, " bytes (--max-request-bytes)")};
}

}  // namespace treadle
