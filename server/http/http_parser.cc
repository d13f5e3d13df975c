#include "server/http/http_parser.h"

#include <boost/asio/buffer.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <utility>

#include "absl/strings/ascii.h"
#include "base/status.h"

namespace treadle {
namespace {

namespace http = boost::beast::http;
using boost::system::error_code;

constexpr std::string_view kLastChunk = "0\r\n\r\n";

// A body as text that grows with what has come, not with what was announced.
struct TextBody {
  using value_type = std::string;
  class reader {
   public:
    template <bool request, class Fields>
    reader(http::header<request, Fields>&, std::string& body) : body_(body) {}
    void init(const boost::optional<uint64_t>&, error_code& error) { error = {}; }
    template <class Buffers>
    size_t put(const Buffers& buffers, error_code& error) {
      const size_t before = body_.size();
      for (const boost::asio::const_buffer part : boost::beast::buffers_range_ref(buffers)) {
        body_.append(static_cast<const char*>(part.data()), part.size());
      }
      error = {};
      return body_.size() - before;
    }
    void finish(error_code& error) { error = {}; }

   private:
    std::string& body_;
  };
};

std::string Text(boost::beast::string_view text) { return {text.data(), text.size()}; }

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

struct HttpParser::State {
  size_t head_bytes;
  uint64_t body_bytes;
  http::request_parser<TextBody> parser;
};

HttpParser::HttpParser(size_t head_bytes, uint64_t body_bytes)
    : state_(new State{head_bytes, body_bytes, {}}) {
  state_->parser.header_limit(static_cast<uint32_t>(head_bytes));
  state_->parser.body_limit(body_bytes);
  state_->parser.eager(true);
}
HttpParser::~HttpParser() = default;

std::optional<HttpParser::Refusal> HttpParser::Take(std::string& bytes) {
  error_code error;
  size_t taken = 0;
  while (!error && !state_->parser.is_done() && taken < bytes.size()) {
    const boost::asio::const_buffer rest(bytes.data() + taken, bytes.size() - taken);
    // A body in chunks ends with at least so many bytes, and Beast asserts that they are there.
    if (has_head() && state_->parser.chunked() && rest.size() < kLastChunk.size()) break;
    const size_t count = state_->parser.put(rest, error);
    taken += count;
    if (count == 0) break;
  }
  bytes.erase(0, taken);
  if (!error || error == http::error::need_more) {
    // Between the head and the end only a chunk's size with what follows it on its line stays over.
    if (!has_head() || whole() || bytes.size() <= state_->head_bytes) return std::nullopt;
    return Refusal{400, Str("expected an HTTP/1 request: the line before a chunk is longer than ",
                            state_->head_bytes, " bytes")};
  }
  if (error == http::error::header_limit) {
    return Refusal{431, Str("the request's head is longer than ", state_->head_bytes, " bytes")};
  }
  if (error == http::error::body_limit) {
    return Refusal{413, Str("the request's body is longer than ", state_->body_bytes,
                            " bytes (--max-request-bytes)")};
  }
  return Refusal{400, Str("expected an HTTP/1 request: ", error.message())};
}

bool HttpParser::has_head() const { return state_->parser.is_header_done(); }
bool HttpParser::whole() const { return state_->parser.is_done(); }
size_t HttpParser::body_bytes() const { return state_->parser.get().body().size(); }
unsigned HttpParser::version() const { return state_->parser.get().version(); }
bool HttpParser::keep_alive() const { return state_->parser.get().keep_alive(); }
bool HttpParser::expects_continue() const {
  return version() > 10 &&
         boost::beast::iequals(state_->parser.get()[http::field::expect], "100-continue");
}
std::string HttpParser::method() const { return Text(state_->parser.get().method_string()); }

HttpRequest HttpParser::Release() {
  auto& message = state_->parser.get();
  HttpRequest request{.path = Text(message.target()), .body = std::move(message.body())};
  if (const size_t mark = request.path.find('?'); mark != std::string::npos) {
    request.query = request.path.substr(mark + 1);
    request.path.resize(mark);
  }
  request.path = Unescaped(request.path);
  for (const auto& field : message) {
    request.headers[absl::AsciiStrToLower(Text(field.name_string()))] = Text(field.value());
  }
  return request;
}

}  // namespace treadle
