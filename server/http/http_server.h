// The server for everything that speaks HTTP/1, plain or TLS: asynchronous, on one thread.
//
// A handler gets a whole request and answers when it likes, at once or in pieces, while the thread
// serves others. Requests of a connection are answered one after another, however early they come.
// A client's resources are limited: the bytes of a head and of a body, those of all bodies that
// are not whole, connections (in total and of one address), the time for a head, for a body, to do
// nothing, and to read nothing of an answer. Where there are too many connections
// (net/admission.h), the oldest that asks nothing makes room, else the oldest whose request is not
// whole. If bodies take too much, the largest ends.
//
// A client may end its side of the connection before it has its answer. One that has closed all of
// it answers the next bytes with a reset, and its request is cancelled; so it is sent some at once:
// "HTTP/1.1 ", with which every answer begins, or a body's filler.
//
// Thread safety: Start and destruction from the owner's thread. Handlers and callbacks run on the
// server's, and must not block.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "net/address.h"
#include "net/admission.h"
#include "net/event_loop.h"

namespace treadle {

class HttpHouse;

struct HttpRequest {
  std::string path = {};   // without the query, unescaped
  std::string query = {};  // what follows '?'
  std::map<std::string, std::string> headers =
      {};  // by name in lower case; lines of one name joined by ", "
  std::string body = {};
  bool head_only = false;  // HEAD: the answer ends with its head, whatever the handler writes
  std::string peer = {};   // "ipv4:127.0.0.1:40000"
  std::chrono::steady_clock::time_point arrival = std::chrono::steady_clock::now();  // of its head

  std::string_view Header(const std::string& lower_case_name) const {
    const auto found = headers.find(lower_case_name);
    return found == headers.end() ? std::string_view() : found->second;
  }
};

struct HttpResponse {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
  std::vector<std::pair<std::string, std::string>> headers = {};  // further ones
  // Bytes without a meaning in the format of a body that comes in pieces. A client that ends its
  // side of the connection is sent them, to learn whether it still reads; without them it is gone.
  std::string filler = {};
};

// The answer to one request: Send alone, or Begin, any number of Writes, End. One that is given up
// unfinished closes the connection.
//
// Thread safety: any thread, but for OnClosed; none waits, and what one thread calls, or several in
// an order of their own, happens in that order. After the client has gone all is accepted and
// nothing is sent; callbacks come nevertheless, each once, on the server's thread.
class HttpReply {
 public:
  using Done = std::function<void()>;              // all is sent, or never will be
  using Written = std::function<void(bool sent)>;  // the system has it, or never will

  virtual ~HttpReply() = default;
  virtual void Send(HttpResponse response, Done done = {}) = 0;
  // A body whose length is not known yet begins with the response's; chunked, where that is known.
  virtual void Begin(HttpResponse response) = 0;
  virtual void Write(std::string bytes, Written written = {}) = 0;
  virtual void End(Done done = {}) = 0;
  // Closes the connection at once.
  virtual void Break() = 0;
  // During the handler: what to call if the client goes away before the end, or a Begin was all
  // that it asked for (HEAD).
  virtual void OnClosed(std::function<void()> closed) = 0;
};

struct HttpRoute {
  std::string method;  // GET serves HEAD, too
  std::string path;    // one that ends with a slash is that of all below it, too; but for "/"
  std::function<void(HttpRequest, std::shared_ptr<HttpReply>)> handle;
};

struct HttpOptions {
  using Time = std::chrono::milliseconds;

  const SocketTls* tls = nullptr;       // must outlive the server; null: plaintext
  size_t head_bytes = 8192;             // request line and headers
  uint64_t body_bytes = 4 << 20;        // of one request
  uint64_t receiving_bytes = 64 << 20;  // of all bodies that are not whole; the server's own
  size_t connections = 1024;
  size_t per_address = 512;
  // As for gRPC: from accept, handshake included, or from its first byte, until a head is whole.
  Time head_patience{10'000};
  Time body_patience{60'000};   // from the head, until the body is whole
  Time idle_patience{60'000};   // between requests; longer than the pools of most clients wait
  Time stall_patience{60'000};  // of a client that reads nothing of its answer
  // Origins that may make a browser ask, and by which names: see http_origin.h.
  std::vector<std::string> allow_origins = {};
  bool any_host = false;  // callers show a key; so it is with TLS, and beyond loopback
  // The answer where the server refuses by itself; empty: as text.
  std::function<HttpResponse(int code, const std::string& message)> refusal = {};
};

class HttpServer {
 public:
  // Open at once, at least.
  static constexpr size_t kMinFiles =
      Admission::kFiles + EventLoop::kFiles + Admission::kMinConnections;

  // `address`: host:port; port 0 takes a free one. Unavailable says why it cannot be had.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address,
                                                           const HttpOptions& options,
                                                           std::vector<HttpRoute> routes);
  // Closes every connection; waits until all replies were given up.
  ~HttpServer();

  const Address& address() const { return address_; }  // with the port that was taken

 private:
  HttpServer(Address address, std::unique_ptr<HttpHouse> house);

  const Address address_;
  const std::unique_ptr<HttpHouse> house_;
  std::thread thread_;
};

}  // namespace treadle
