#include "server/http/http_connection.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/match.h"
#include "base/choice.h"
#include "base/quoted.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/http/http_origin.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr auto kNever = SteadyClock::time_point::max();
constexpr std::chrono::milliseconds kLastWords{2'000};  // for the client to close, once told
constexpr int kMaxDiscarded = 256;  // reads of what a client still sends meanwhile
constexpr size_t kAhead = 8 << 10;  // bytes that are read ahead while a request is under way
constexpr size_t kKept = 16 << 10;  // bytes of a buffer that an idle connection keeps

constexpr char kVersion[] = "HTTP/1.1 ";  // begins every answer

constexpr Choice<int> kReasons[] = {{"OK", 200},
                                    {"No Content", 204},
                                    {"Not Modified", 304},
                                    {"Bad Request", 400},
                                    {"Unauthorized", 401},
                                    {"Forbidden", 403},
                                    {"Not Found", 404},
                                    {"Method Not Allowed", 405},
                                    {"Request Timeout", 408},
                                    {"Conflict", 409},
                                    {"Payload Too Large", 413},
                                    {"Unsupported Media Type", 415},
                                    {"Too Many Requests", 429},
                                    {"Request Header Fields Too Large", 431},
                                    {"Client Closed Request", 499},
                                    {"Internal Server Error", 500},
                                    {"Not Implemented", 501},
                                    {"Service Unavailable", 503},
                                    {"Gateway Timeout", 504}};

}  // namespace

// Does on the loop's thread what it is told on any.
class HttpReplyOf final : public HttpReply {
 public:
  HttpReplyOf(std::shared_ptr<EventLoop> loop, std::shared_ptr<HttpConnection> connection)
      : loop_(std::move(loop)), connection_(std::move(connection)), number_(connection_->number_) {}
  // The connection itself goes on the loop's thread.
  ~HttpReplyOf() override {
    loop_->Post(
        [connection = std::move(connection_), number = number_] { connection->Break(number); });
  }

  void Send(HttpResponse response, Done done) override {
    Post([response = std::move(response), done = std::move(done)](HttpConnection& to,
                                                                  uint64_t number) {
      to.Begin(number, response, /*whole=*/true);
      to.End(number, done);
    });
  }
  void Begin(HttpResponse response) override {
    Post([response = std::move(response)](HttpConnection& to, uint64_t number) {
      to.Begin(number, response, /*whole=*/false);
    });
  }
  void Write(std::string bytes, Written written) override {
    Post([bytes = std::move(bytes), written = std::move(written)](
             HttpConnection& to, uint64_t number) { to.Write(number, bytes, written); });
  }
  void End(Done done) override {
    Post([done = std::move(done)](HttpConnection& to, uint64_t number) { to.End(number, done); });
  }
  void Break() override {
    Post([](HttpConnection& to, uint64_t number) { to.Break(number); });
  }
  void OnClosed(std::function<void()> closed) override { connection_->closed_ = std::move(closed); }

 private:
  template <typename Do>
  void Post(Do what) {
    loop_->Post([what = std::move(what), connection = connection_, number = number_] {
      what(*connection, number);
    });
  }

  const std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<HttpConnection> connection_;
  const uint64_t number_;
};

HttpConnection::HttpConnection(HttpHouse& house, uint64_t id, Newcomer newcomer)
    : house_(house),
      id_(id),
      host_(std::move(newcomer.host)),
      peer_(std::move(newcomer.peer)),
      socket_(std::move(newcomer.socket)) {
  ++house_.alive_;
}

void HttpConnection::Start() {
  deadline_ = SteadyClock::now() + house_.options().head_patience;
  watch_.emplace(house_.loop(), socket_->fd(),
                 [connection = weak_from_this()] { connection.lock()->Serve(); });
  NextRequest();
}

void HttpConnection::NextRequest() {
  ++number_;
  stage_ = kHead;
  begun_ = ended_ = answer_begun_ = false;
  filler_.reset();
  closed_ = nullptr;
  parser_.emplace(house_.options().head_bytes, house_.options().body_bytes);
  if (in_.empty()) {
    Read();
  } else {
    Parse();
  }
}

void HttpConnection::Serve() {
  if (stage_ == kClosing) {
    if (!said_all_) {
      said_all_ = socket_->End();
    } else if (!socket_->Discard() || ++discarded_ > kMaxDiscarded) {
      return Close();
    }
    return Arm();
  }
  if (reading_) {
    char buffer[ClientSocket::kReadSize];
    const ssize_t count = socket_->Read(buffer);
    reads_ = socket_->events();
    if (count != 0) {
      reading_ = false;
      OnRead({buffer, static_cast<size_t>(std::max<ssize_t>(count, 0))});
    }
    if (stage_ == kClosing || stage_ == kClosed) return;
  }
  if (writing_ && !going_.empty()) Send();
  if (input_over_ && stage_ != kClosed && IsReset(socket_->fd())) return Close();
  Arm();
}

void HttpConnection::Arm() {
  if (stage_ == kClosed) return;
  uint32_t events = 0;
  if (stage_ == kClosing) {
    events = socket_->events();
  } else {
    if (reading_) events |= reads_;
    if (sent_ < going_.size()) events |= writes_;
    if (input_over_) events |= EPOLLERR;
  }
  watch_->For(events);
}

void HttpConnection::Read() {
  if (reading_ || stage_ == kClosed || stage_ == kClosing) return;
  if (input_over_) {
    if (stage_ != kAnswering) Linger();
    return;
  }
  reading_ = true;
  reads_ = EPOLLIN;
  Arm();
}

// `bytes`: none at the end of the connection.
void HttpConnection::OnRead(std::string_view bytes) {
  if (bytes.empty()) {
    if (!socket_->greeted()) return Linger();
    return OnEnd();
  }
  in_.append(bytes);
  if (stage_ != kAnswering) return Parse();
  if (in_.size() < kAhead) Read();  // to see it close
}

// The answers to what was asked are still to come.
void HttpConnection::OnEnd() {
  if (stage_ != kAnswering || !socket_->ended()) return Close();
  input_over_ = true;
  keep_alive_ &= !in_.empty();
  if (ended_) return;
  if (filler_ && filler_->empty()) return Close();
  if (filler_) {
    Write(number_, *filler_, {});
  } else {
    out_ += kVersion;
    answer_begun_ = true;
    Flush();
  }
}

void HttpConnection::Parse() {
  const bool had_head = parser_->has_head();
  if (const auto refusal = parser_->Take(in_)) return Refuse(refusal->code, refusal->message);
  if (!begun_ && (parser_->begun() || !in_.empty())) {
    begun_ = true;
    if (number_ > 1) deadline_ = SteadyClock::now() + house_.options().head_patience;
  }
  if (!had_head && parser_->has_head()) OnHead();
  if (parser_->whole()) {
    Count(0);
    return Handle();
  }
  if (parser_->has_head()) Count(parser_->body_bytes());
  if (stage_ != kAnswering) Read();  // else it was the largest
}

void HttpConnection::OnHead() {
  arrival_ = SteadyClock::now();
  deadline_ = arrival_ + house_.options().body_patience;
  stage_ = kBody;
  version_ = parser_->version();
  keep_alive_ = parser_->keep_alive();
  if (parser_->expects_continue() && !parser_->whole()) {
    out_ += Str(kVersion, "100 Continue\r\n\r\n");
    Flush();
  }
}

void HttpConnection::Count(uint64_t received) {
  const uint64_t before = std::exchange(receiving_, received);
  house_.Count(received, before);
}

// A route that ends with a slash takes what is below it.
static bool Takes(const std::string& route, const std::string& path) {
  return route == path || (route.size() > 1 && route.back() == '/' && path.size() > route.size() &&
                           path.starts_with(route));
}

void HttpConnection::Handle() {
  std::string method = parser_->method();
  HttpRequest request = parser_->Release();
  request.peer = peer_;
  request.arrival = arrival_;
  parser_.reset();
  stage_ = kAnswering;
  deadline_ = kNever;
  request.head_only = head_only_ = method == "HEAD";
  if (head_only_) method = "GET";
  std::string allowed;
  const HttpRoute* found = nullptr;
  for (const HttpRoute& route : house_.routes_) {
    if (!Takes(route.path, request.path)) continue;
    if (route.method == method) found = &route;
    allowed += (allowed.empty() ? "" : ", ") + route.method;
    if (route.method == "GET") allowed += ", HEAD";
  }
  const auto reply = std::make_shared<HttpReplyOf>(house_.loop_, shared_from_this());
  const std::string where = Printable(Cut(request.path, 200));
  const HttpOptions& options = house_.options();
  cors_ = CorsLines(request, options.allow_origins);
  if (const std::string stranger = Stranger(request, options.allow_origins, options.any_host);
      !stranger.empty()) {
    reply->Send(options.refusal(403, stranger), {});
  } else if (const std::string_view coding = request.Header("content-encoding");
             !coding.empty() &&
             !absl::EqualsIgnoreCase({coding.data(), coding.size()}, "identity")) {
    HttpResponse response = options.refusal(
        415, "the header Content-Encoding is " + Quoted(coding) + ", expected a body without one");
    response.headers.push_back({"Accept-Encoding", "identity"});
    reply->Send(std::move(response), {});
  } else if (method == "OPTIONS" && !cors_.empty() && !allowed.empty()) {
    reply->Send(PreflightAnswer(request, allowed), {});
  } else if (found != nullptr) {
    found->handle(std::move(request), reply);
  } else if (allowed.empty()) {
    reply->Send(options.refusal(404, "there is no " + where), {});
  } else {
    HttpResponse response =
        options.refusal(405, method + " is not for " + where + ", expected " + allowed);
    response.headers.push_back({"Allow", allowed});
    reply->Send(std::move(response), {});
  }
  Read();
}

// Bytes that follow on the connection have no meaning.
void HttpConnection::Refuse(int code, const std::string& message) {
  parser_.reset();
  stage_ = kAnswering;
  cors_.clear();
  Count(0);
  keep_alive_ = head_only_ = false;
  Begin(number_, house_.options().refusal(code, message), /*whole=*/true);
  End(number_, {});
}

void HttpConnection::Begin(uint64_t number, const HttpResponse& response, bool whole) {
  if (!Open(number)) return;
  chunked_ = !whole && version_ > 10;
  filler_ = response.filler;
  if (!whole && !chunked_ && !head_only_) keep_alive_ = false;  // the body ends with it
  out_ += Str(answer_begun_ ? "" : kVersion, response.code, " ", WordOf(kReasons, response.code),
              "\r\nContent-Type: ", response.content_type);
  for (const auto& [name, value] : response.headers) out_ += "\r\n" + name + ": " + value;
  if (response.code == 401) out_ += "\r\nWWW-Authenticate: Bearer";
  out_ += cors_;
  const bool bodiless = response.code == 204 || response.code == 304;
  if (whole && !bodiless) out_ += Str("\r\nContent-Length: ", response.body.size());
  if (chunked_) out_ += "\r\nTransfer-Encoding: chunked";
  if (!keep_alive_) out_ += "\r\nConnection: close";
  if (keep_alive_ && version_ < 11) out_ += "\r\nConnection: keep-alive";
  out_ += "\r\n\r\n";
  Write(number, response.body, {});
  if (!head_only_ || whole) return;
  // A stream ends here for HEAD: nobody would read on, and the next request need not wait.
  ended_ = true;
  if (const auto closed = std::exchange(closed_, nullptr)) closed();
}

void HttpConnection::Write(uint64_t number, std::string_view bytes, HttpReply::Written written) {
  if (!Open(number)) {
    if (written) written(false);
    return;
  }
  if (!head_only_ && !bytes.empty()) {
    char length[20] = "";
    if (chunked_) std::snprintf(length, sizeof length, "%zx\r\n", bytes.size());
    out_ += length;
    out_ += bytes;
    if (chunked_) out_ += "\r\n";
  }
  if (written) out_told_.push_back(std::move(written));
  Flush();
}

void HttpConnection::End(uint64_t number, HttpReply::Done done) {
  if (!Open(number)) {
    if (done) done();
    return;
  }
  if (chunked_ && !head_only_) out_ += "0\r\n\r\n";
  ended_ = true;
  if (done) out_told_.push_back([done = std::move(done)](bool) { done(); });
  Flush();
}

void HttpConnection::Flush() {
  if (writing_ || stage_ == kClosed) return;
  writing_ = true;
  house_.loop().Post([self = shared_from_this()] {
    if (self->stage_ == kClosed) return;
    self->going_.swap(self->out_);
    self->going_told_.swap(self->out_told_);
    self->DelayStall();
    self->Send();
    self->Arm();
  });
}

void HttpConnection::DelayStall() {
  if (stage_ == kAnswering) deadline_ = SteadyClock::now() + house_.options().stall_patience;
}

void HttpConnection::Send() {
  while (sent_ < going_.size()) {
    const ssize_t count = socket_->Write(going_.data() + sent_, going_.size() - sent_);
    writes_ = socket_->events();
    if (count < 0) return Close();
    if (count == 0) return;
    sent_ += static_cast<size_t>(count);
    DelayStall();
  }
  sent_ = 0;
  going_.clear();
  if (going_.capacity() > kKept) going_.shrink_to_fit();
  writing_ = false;
  Tell(true);
  OnWritten();
}

void HttpConnection::Tell(bool sent) {
  for (const auto& told : std::exchange(going_told_, {})) told(sent);
}

void HttpConnection::OnWritten() {
  if (stage_ == kClosed) return;
  if (!out_.empty() || !out_told_.empty()) return Flush();
  if (stage_ != kAnswering) return;  // "100 Continue"
  deadline_ = kNever;
  if (!ended_) return;
  if (!keep_alive_) return Linger();
  deadline_ = SteadyClock::now() + house_.options().idle_patience;
  NextRequest();
}

// Says that this is the end, and reads what the client still sends: were it left, its end might
// lose the last bytes of the answer.
void HttpConnection::Linger() {
  stage_ = kClosing;
  deadline_ = SteadyClock::now() + kLastWords;
  said_all_ = socket_->End();
  Arm();
}

void HttpConnection::Close() {
  if (stage_ == kClosed) return;
  const auto self = shared_from_this();
  const bool told = stage_ == kAnswering && !ended_;
  stage_ = kClosed;
  deadline_ = kNever;
  Count(0);
  watch_.reset();
  socket_.reset();
  house_.Leave(id_, host_);
  Tell(false);
  for (const auto& written : std::exchange(out_told_, {})) written(false);
  if (const auto closed = std::exchange(closed_, nullptr); closed && told) closed();
}

void HttpConnection::Look(TimePoint now) {
  if (now < deadline_) return;
  if (stage_ != kBody) return Close();
  Refuse(408, Str("the request's body was not whole within ",
                  house_.options().body_patience.count(), " ms"));
}

}  // namespace treadle
