#include "server/http/http_server.h"

#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <optional>

#include "absl/strings/ascii.h"
#include "base/status.h"
#include "base/utf8.h"

namespace treadle {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using SteadyClock = std::chrono::steady_clock;
using Tcp = net::ip::tcp;
using Executor = net::io_context::executor_type;
using Socket = net::basic_stream_socket<Tcp, Executor>;
using Timer = net::basic_waitable_timer<SteadyClock, net::wait_traits<SteadyClock>, Executor>;

constexpr auto kNever = SteadyClock::time_point::max();
constexpr std::chrono::milliseconds kSweep{100};        // between two looks at deadlines
constexpr std::chrono::milliseconds kLastWords{2'000};  // for the client to close, once told
constexpr int kDiscarded = 1024;    // reads of what a client still sends meanwhile
constexpr size_t kAhead = 8 << 10;  // bytes that are read ahead while a request is under way
// Of the system, in each direction: by itself it keeps megabytes for who reads slowly.
constexpr int kSystemBuffer = 128 << 10;
constexpr size_t kKept = 16 << 10;  // bytes of a buffer that an idle connection keeps

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
      for (const net::const_buffer part : boost::beast::buffers_range_ref(buffers)) {
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
using Parser = http::request_parser<TextBody>;

// Lets the process open a file for each connection more; fewer connections where it may not.
size_t Affordable(size_t connections) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return connections;
  files.rlim_cur = std::min<rlim_t>(files.rlim_cur + connections, files.rlim_max);
  setrlimit(RLIMIT_NOFILE, &files);
  return std::clamp<size_t>(files.rlim_cur / 4, 4, connections);
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

std::string_view View(boost::beast::string_view text) { return {text.data(), text.size()}; }

}  // namespace

// Everything is the thread's, while it runs.
struct HttpServer::State {
  State(int fd, bool v6, const HttpOptions& given, std::vector<HttpRoute> all)
      : options(given),
        routes(std::move(all)),
        acceptor(*io, v6 ? Tcp::v6() : Tcp::v4(), fd),
        sweep(*io) {
    options.connections = Affordable(options.connections);
    options.per_address = std::min(options.per_address, options.connections);
    if (!options.refusal) {
      options.refusal = [](int code, const std::string& message) {
        return HttpResponse{.code = code, .body = message + "\n"};
      };
    }
  }

  void Listen();
  bool Accept();  // false: there is nobody else now
  bool MakeRoom(const std::string& host);
  void LimitReceiving();
  void Sweep();
  void Stop();

  HttpOptions options;
  const std::vector<HttpRoute> routes;
  // Replies keep it, so that they can be given up at any time.
  const std::shared_ptr<net::io_context> io = std::make_shared<net::io_context>(1);
  net::basic_socket_acceptor<Tcp, Executor> acceptor;
  Timer sweep;
  bool sweeping = false;
  bool stopped = false;
  std::map<uint64_t, std::shared_ptr<Connection>> connections;  // by age
  std::map<std::string, size_t> of_host;
  uint64_t next = 1;
  uint64_t receiving = 0;
};

class HttpServer::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(State& server, uint64_t id, Socket socket, std::string host, std::string peer)
      : server_(server),
        id_(id),
        host_(std::move(host)),
        peer_(std::move(peer)),
        socket_(std::move(socket)),
        work_(net::make_work_guard(*server.io)) {}

  bool UseTls(const SocketTls& tls);
  void Start();

  const std::string& host() const { return host_; }
  bool idle() const { return state_ != kAnswering; }
  uint64_t receiving() const { return receiving_; }
  void Look(SteadyClock::time_point now);  // at its deadline
  void Refuse(int code, const std::string& message);
  void Close();

  // Of the reply to request `number`.
  void Begin(uint64_t number, const HttpResponse& response, bool whole);
  void Write(uint64_t number, std::string_view bytes, HttpReply::Written written);
  void End(uint64_t number, HttpReply::Done done);
  void Break(uint64_t number) {
    if (Open(number)) Close();
  }

 private:
  friend class Reply;
  enum Stage { kHandshake, kHead, kBody, kAnswering, kClosing, kClosed };

  // Whether the answer to that request is not at its end.
  bool Open(uint64_t number) const { return state_ == kAnswering && number == number_ && !ended_; }
  void NextRequest();
  void Read();
  void OnRead(const error_code& error, size_t count);
  void Parse();
  void OnHead();
  void Count(uint64_t received);
  void Handle();
  void PutHead(const HttpResponse& response, bool whole);
  void Flush();
  void OnWritten(const error_code& error);
  void Linger();

  State& server_;
  const uint64_t id_;
  const std::string host_, peer_;
  Socket socket_;
  std::optional<net::ssl::stream<Socket&>> tls_;
  const net::executor_work_guard<Executor> work_;
  SteadyClock::time_point deadline_ = kNever;

  Stage state_ = kHead;
  std::array<char, 4096> read_;
  bool reading_ = false;
  std::string in_;  // that is not parsed yet
  std::optional<Parser> parser_;
  uint64_t receiving_ = 0;  // as counted in the server's
  int discarded_ = 0;
  SteadyClock::time_point arrival_;

  // Of the request under way.
  uint64_t number_ = 0;
  bool keep_alive_ = false, head_only_ = false, chunked_ = false, ended_ = false;
  unsigned version_ = 11;
  std::function<void()> closed_;

  bool writing_ = false;
  std::string out_, going_;  // what waits, and what is on its way
  std::vector<HttpReply::Written> out_told_, going_told_;
};

class HttpServer::Reply final : public HttpReply {
 public:
  Reply(std::shared_ptr<net::io_context> io, std::shared_ptr<Connection> connection)
      : io_(std::move(io)), connection_(std::move(connection)), number_(connection_->number_) {}
  // The connection itself goes on its own thread.
  ~Reply() override {
    net::post(*io_, [connection = std::move(connection_), number = number_] {
      connection->Break(number);
    });
  }

  void Send(HttpResponse response, Done done) override {
    Post([response = std::move(response), done = std::move(done)](Connection& to,
                                                                  uint64_t number) mutable {
      to.Begin(number, response, /*whole=*/true);
      to.End(number, std::move(done));
    });
  }
  void Begin(HttpResponse response) override {
    Post([response = std::move(response)](Connection& to, uint64_t number) {
      to.Begin(number, response, /*whole=*/false);
    });
  }
  void Write(std::string bytes, Written written) override {
    Post([bytes = std::move(bytes), written = std::move(written)](Connection& to,
                                                                  uint64_t number) mutable {
      to.Write(number, bytes, std::move(written));
    });
  }
  void End(Done done) override {
    Post([done = std::move(done)](Connection& to, uint64_t number) mutable {
      to.End(number, std::move(done));
    });
  }
  void Break() override {
    Post([](Connection& to, uint64_t number) { to.Break(number); });
  }
  void OnClosed(std::function<void()> closed) override { connection_->closed_ = std::move(closed); }

 private:
  template <typename Do>
  void Post(Do what) {
    net::post(*io_, [what = std::move(what), connection = connection_, number = number_]() mutable {
      what(*connection, number);
    });
  }

  const std::shared_ptr<net::io_context> io_;
  std::shared_ptr<Connection> connection_;
  const uint64_t number_;
};

// -- connections ----------------------------------------------------------------------------------

bool HttpServer::Connection::UseTls(const SocketTls& tls) {
  const TlsSession session = tls.NewSession(socket_.native_handle());
  if (!session) return false;
  // Asio makes a session of its own, of the same context: the one in force now.
  SSL_CTX* const current = SSL_get_SSL_CTX(session.get());
  SSL_CTX_up_ref(current);
  net::ssl::context context(current);
  tls_.emplace(socket_, context);
  return true;
}

void HttpServer::Connection::Start() {
  deadline_ = SteadyClock::now() + server_.options.head_patience;
  if (!tls_) return NextRequest();
  state_ = kHandshake;
  tls_->async_handshake(net::ssl::stream_base::server,
                        [self = shared_from_this()](const error_code& error) {
                          if (self->state_ != kHandshake) return;
                          error ? self->Linger() : self->NextRequest();
                        });
}

void HttpServer::Connection::NextRequest() {
  ++number_;
  state_ = kHead;
  ended_ = false;
  closed_ = nullptr;
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(server_.options.head_bytes));
  parser_->body_limit(server_.options.body_bytes);
  parser_->eager(true);
  if (!in_.empty()) return Parse();
  Read();
}

void HttpServer::Connection::Read() {
  if (reading_ || state_ == kClosed) return;
  reading_ = true;
  const auto then = [self = shared_from_this()](const error_code& error, size_t count) {
    self->reading_ = false;
    self->OnRead(error, count);
  };
  // What comes after the last word is nobody's business.
  if (tls_ && state_ != kClosing) {
    tls_->async_read_some(net::buffer(read_), then);
  } else {
    socket_.async_read_some(net::buffer(read_), then);
  }
}

void HttpServer::Connection::OnRead(const error_code& error, size_t count) {
  if (state_ == kClosed) return;
  if (error) {
    if (state_ != kAnswering || !ended_) return Close();
    keep_alive_ = false;  // it may still read what is on its way
    return;
  }
  if (state_ == kClosing) {
    if (++discarded_ > kDiscarded) return Close();
    return Read();
  }
  if (state_ == kHead && in_.empty() && number_ > 1) {
    deadline_ = SteadyClock::now() + server_.options.head_patience;
  }
  in_.append(read_.data(), count);
  if (state_ != kAnswering) return Parse();
  if (in_.size() < kAhead) Read();  // to see it close
}

void HttpServer::Connection::Parse() {
  const bool had_head = parser_->is_header_done();
  error_code error;
  size_t taken = 0;
  while (!error && !parser_->is_done() && taken < in_.size()) {
    const size_t count = parser_->put(net::buffer(in_.data() + taken, in_.size() - taken), error);
    taken += count;
    if (count == 0) break;
  }
  in_.erase(0, taken);
  if (error && error != http::error::need_more) {
    if (error == http::error::header_limit) {
      return Refuse(
          431, Str("the request's head is longer than ", server_.options.head_bytes, " bytes"));
    }
    if (error == http::error::body_limit) {
      return Refuse(413, Str("the request's body is longer than ", server_.options.body_bytes,
                             " bytes (--max-request-bytes)"));
    }
    return Refuse(400, Str("expected an HTTP/1 request: ", error.message()));
  }
  if (!had_head && parser_->is_header_done()) OnHead();
  Count(parser_->is_done() ? 0 : parser_->get().body().size());
  if (state_ == kAnswering) return;  // it was the largest
  if (!parser_->is_done()) return Read();
  Handle();
}

void HttpServer::Connection::OnHead() {
  arrival_ = SteadyClock::now();
  deadline_ = arrival_ + server_.options.body_patience;
  state_ = kBody;
  const auto& message = parser_->get();
  version_ = message.version();
  keep_alive_ = message.keep_alive();
  head_only_ = message.method() == http::verb::head;
  if (!parser_->is_done() && version_ > 10 &&
      boost::beast::iequals(message[http::field::expect], "100-continue")) {
    out_ += "HTTP/1.1 100 Continue\r\n\r\n";
    Flush();
  }
}

void HttpServer::Connection::Count(uint64_t received) {
  server_.receiving += received - receiving_;
  receiving_ = received;
  if (server_.receiving > server_.options.receiving_bytes) server_.LimitReceiving();
}

void HttpServer::Connection::Handle() {
  auto& message = parser_->get();
  HttpRequest request{.path = std::string(View(message.target())),
                      .query = {},
                      .headers = {},
                      .body = std::move(message.body()),
                      .peer = peer_,
                      .arrival = arrival_};
  if (const size_t mark = request.path.find('?'); mark != std::string::npos) {
    request.query = request.path.substr(mark + 1);
    request.path.resize(mark);
  }
  request.path = Unescaped(request.path);
  const std::string where = Printable(Cut(request.path, 200));
  std::string allowed;
  const std::string_view method = head_only_ ? "GET" : View(message.method_string());
  const HttpRoute* found = nullptr;
  for (const HttpRoute& route : server_.routes) {
    if (route.path != request.path) continue;
    if (route.method == method) found = &route;
    allowed +=
        (allowed.empty() ? "" : ", ") + route.method + (route.method == "GET" ? ", HEAD" : "");
  }
  for (const auto& field : message) {
    request.headers[absl::AsciiStrToLower(
        absl::string_view(field.name_string().data(), field.name_string().size()))] =
        std::string(View(field.value()));
  }
  const std::string asked(method);
  parser_.reset();
  state_ = kAnswering;
  deadline_ = kNever;
  const auto reply = std::make_shared<Reply>(server_.io, shared_from_this());
  if (found != nullptr) {
    found->handle(std::move(request), reply);
  } else if (allowed.empty()) {
    reply->Send(server_.options.refusal(404, "there is no " + where), {});
  } else {
    HttpResponse response =
        server_.options.refusal(405, asked + " is not for " + where + ", expected " + allowed);
    response.headers.push_back({"Allow", allowed});
    reply->Send(std::move(response), {});
  }
  Read();
}

// Answers in a handler's place, and closes: what follows on the connection has no meaning.
void HttpServer::Connection::Refuse(int code, const std::string& message) {
  Count(0);
  keep_alive_ = head_only_ = false;
  parser_.reset();
  state_ = kAnswering;
  Begin(number_, server_.options.refusal(code, message), /*whole=*/true);
  End(number_, {});
}

void HttpServer::Connection::Begin(uint64_t number, const HttpResponse& response, bool whole) {
  if (!Open(number)) return;
  chunked_ = !whole && version_ > 10;
  if (!whole && !chunked_) keep_alive_ = false;  // its end says where the body ends
  const std::string_view reason = View(http::obsolete_reason(http::int_to_status(response.code)));
  out_ += Str("HTTP/1.1 ", response.code, " ", reason, "\r\nContent-Type: ", response.content_type);
  for (const auto& [name, value] : response.headers) out_ += "\r\n" + name + ": " + value;
  if (response.code == 401) out_ += "\r\nWWW-Authenticate: Bearer";
  if (whole) out_ += Str("\r\nContent-Length: ", response.body.size());
  if (chunked_) out_ += "\r\nTransfer-Encoding: chunked";
  if (!keep_alive_) out_ += "\r\nConnection: close";
  if (keep_alive_ && version_ < 11) out_ += "\r\nConnection: keep-alive";
  out_ += "\r\n\r\n";
  Write(number, response.body, {});
}

void HttpServer::Connection::Write(uint64_t number, std::string_view bytes,
                                   HttpReply::Written written) {
  if (!Open(number)) {
    if (written) written(false);
    return;
  }
  if (!head_only_ && !bytes.empty()) {
    if (chunked_) {
      char length[20];
      std::snprintf(length, sizeof length, "%zx\r\n", bytes.size());
      out_ += length;
    }
    out_ += bytes;
    if (chunked_) out_ += "\r\n";
  }
  if (written) out_told_.push_back(std::move(written));
  Flush();
}

void HttpServer::Connection::End(uint64_t number, HttpReply::Done done) {
  if (!Open(number)) {
    if (done) done();
    return;
  }
  if (chunked_ && !head_only_) out_ += "0\r\n\r\n";
  ended_ = true;
  chunked_ = false;
  if (done) out_told_.push_back([done = std::move(done)](bool) { done(); });
  Flush();
}

void HttpServer::Connection::Flush() {
  if (writing_ || state_ == kClosed) return;
  writing_ = true;
  going_.swap(out_);
  going_told_.swap(out_told_);
  if (state_ == kAnswering) deadline_ = SteadyClock::now() + server_.options.stall_patience;
  const auto progress = [self = shared_from_this()](const error_code& error, size_t) -> size_t {
    if (self->state_ == kAnswering) {
      self->deadline_ = SteadyClock::now() + self->server_.options.stall_patience;
    }
    return error ? 0 : 1 << 20;
  };
  const auto then = [self = shared_from_this()](const error_code& error, size_t) {
    self->OnWritten(error);
  };
  if (tls_) {
    net::async_write(*tls_, net::buffer(going_), progress, then);
  } else {
    net::async_write(socket_, net::buffer(going_), progress, then);
  }
}

void HttpServer::Connection::OnWritten(const error_code& error) {
  writing_ = false;
  going_.clear();
  if (going_.capacity() > kKept) going_.shrink_to_fit();
  for (const auto& told : std::exchange(going_told_, {})) told(!error);
  if (state_ == kClosed) return;
  if (error) return Close();
  if (!out_.empty() || !out_told_.empty()) return Flush();
  if (state_ != kAnswering) return;  // "100 Continue"
  deadline_ = kNever;
  if (!ended_) return;
  if (!keep_alive_) return Linger();
  deadline_ = SteadyClock::now() +
              (in_.empty() ? server_.options.idle_patience : server_.options.head_patience);
  NextRequest();
}

// Says that this is the end, and reads what the client still sends: were it left, its end might
// lose the last bytes of the answer.
void HttpServer::Connection::Linger() {
  const bool greeted = state_ != kHandshake;
  state_ = kClosing;
  deadline_ = SteadyClock::now() + kLastWords;
  const auto end = [self = shared_from_this()](const error_code&) {
    error_code ignored;
    self->socket_.shutdown(Socket::shutdown_send, ignored);
    self->Read();
  };
  if (tls_ && greeted) {
    tls_->async_shutdown(end);
  } else {
    end({});
  }
}

void HttpServer::Connection::Close() {
  if (state_ == kClosed) return;
  const bool told = state_ == kAnswering && !ended_;
  const auto self = shared_from_this();
  Count(0);
  state_ = kClosed;
  deadline_ = kNever;
  error_code ignored;
  socket_.close(ignored);
  const auto of_host = server_.of_host.find(host_);
  if (--of_host->second == 0) server_.of_host.erase(of_host);
  server_.connections.erase(id_);
  for (const auto& written : std::exchange(out_told_, {})) written(false);
  if (const auto closed = std::exchange(closed_, nullptr); closed && told) closed();
}

void HttpServer::Connection::Look(SteadyClock::time_point now) {
  if (now < deadline_) return;
  if (state_ == kBody) {
    return Refuse(408, Str("the request's body was not whole within ",
                           server_.options.body_patience.count(), " ms"));
  }
  Close();
}

// -- the server -----------------------------------------------------------------------------------

void HttpServer::State::Listen() {
  acceptor.async_wait(acceptor.wait_read, [this](const error_code& error) {
    if (error || stopped) return;
    while (Accept()) {
    }
    if (!sweeping) Sweep();
    Listen();
  });
}

bool HttpServer::State::Accept() {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  const int fd = accept4(acceptor.native_handle(), reinterpret_cast<sockaddr*>(&from), &size,
                         SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) {
      return errno == EINTR || errno == ECONNABORTED;
    }
    // The connection stays pending; without room, no spinning on it.
    if (MakeRoom("")) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return false;
  }
  const int at_once = 1;  // an answer is several writes: none shall wait for an acknowledgement
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kSystemBuffer, sizeof kSystemBuffer);
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &kSystemBuffer, sizeof kSystemBuffer);
  const bool v6 = from.ss_family == AF_INET6;
  Socket socket(*io);
  error_code error;
  socket.assign(v6 ? Tcp::v6() : Tcp::v4(), fd, error);
  if (error) {
    close(fd);
    return true;
  }
  Tcp::endpoint peer;
  std::memcpy(peer.data(), &from, size);
  peer.resize(size);
  const std::string host = peer.address().to_string();
  const auto of = of_host.find(host);
  const bool too_many = of != of_host.end() && of->second >= options.per_address;
  if ((too_many || connections.size() >= options.connections) && !MakeRoom(too_many ? host : "")) {
    return true;
  }
  const auto connection = std::make_shared<Connection>(
      *this, next, std::move(socket), host,
      v6 ? Str("ipv6:[", host, "]:", peer.port()) : Str("ipv4:", host, ":", peer.port()));
  if (options.tls != nullptr && !connection->UseTls(*options.tls)) return true;
  connections.emplace(next++, connection);
  ++of_host[host];
  connection->Start();
  return true;
}

// Of `host`; empty: of the one that has most connections.
bool HttpServer::State::MakeRoom(const std::string& host) {
  const auto most =
      std::ranges::max_element(of_host, {}, [](const auto& count) { return count.second; });
  if (most == of_host.end()) return false;
  const std::string& from = host.empty() ? most->first : host;
  const auto idle = std::ranges::find_if(connections, [&](const auto& connection) {
    return connection.second->host() == from && connection.second->idle();
  });
  if (idle == connections.end()) return false;
  const std::shared_ptr<Connection> oldest = idle->second;
  oldest->Close();
  return true;
}

void HttpServer::State::LimitReceiving() {
  const auto largest = std::ranges::max_element(
      connections, {}, [](const auto& connection) { return connection.second->receiving(); });
  const std::shared_ptr<Connection> connection = largest->second;
  connection->Refuse(503, Str("the server holds more than ", options.receiving_bytes,
                              " bytes of unfinished requests (--max-receive-memory)"));
}

void HttpServer::State::Sweep() {
  sweeping = !connections.empty() && !stopped;
  if (!sweeping) return;
  sweep.expires_after(kSweep);
  sweep.async_wait([this](const error_code& error) {
    if (error) return;
    const auto now = SteadyClock::now();
    for (auto next_one = connections.begin(); next_one != connections.end();) {
      const std::shared_ptr<Connection> connection = (next_one++)->second;
      connection->Look(now);
    }
    Sweep();
  });
}

void HttpServer::State::Stop() {
  stopped = true;
  error_code ignored;
  acceptor.close(ignored);
  sweep.cancel();
  while (!connections.empty()) {
    const std::shared_ptr<Connection> connection = connections.begin()->second;
    connection->Close();
  }
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& text,
                                                              const HttpOptions& options,
                                                              std::vector<HttpRoute> routes) {
  TREADLE_ASSIGN_OR_RETURN(Address address, ParseAddress(text));
  TREADLE_ASSIGN_OR_RETURN(const int fd, OpenListener(address));
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  TREADLE_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0);
  auto state = std::make_unique<State>(fd, own.ss_family == AF_INET6, options, std::move(routes));
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(address), std::move(state)));
}

HttpServer::HttpServer(Address address, std::unique_ptr<State> state)
    : address_(std::move(address)), state_(std::move(state)) {
  state_->Listen();
  thread_ = std::thread([this] { state_->io->run(); });
}

HttpServer::~HttpServer() {
  net::post(*state_->io, [this] { state_->Stop(); });
  thread_.join();
}

}  // namespace treadle
