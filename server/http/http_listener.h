// A small HTTP/1 server for scrapes, plain or over TLS: one thread, one request per connection, GET
// only.
//
// Nothing that a client does takes more than a place in a small table: a connection has
// `patience` from accept to the last byte, handshake included, a request head at most 8 KiB, and
// when the table is full the oldest connection makes room for the new one. Stopping does not wait
// for clients.
//
// Thread safety: Start and destruction from the owner's thread; the handler runs on the listener's.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "net/client_socket.h"

namespace treadle {

struct HttpRequest {
  std::string path;           // without the query
  std::string authorization;  // the header's value; empty: absent
};

struct HttpResponse {
  int code = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpListener {
 public:
  struct Options {
    std::chrono::milliseconds patience{5'000};
    size_t connections = 32;
    const SocketTls* tls = nullptr;  // must outlive the listener; null: plaintext
  };
  using Handler = std::function<HttpResponse(const HttpRequest&)>;

  // `address`: host:port; port 0 takes a free one. Unavailable says why it cannot be had.
  static absl::StatusOr<std::unique_ptr<HttpListener>> Start(const std::string& address,
                                                             const Options& options,
                                                             Handler handler);
  ~HttpListener();

  int port() const { return port_; }

 private:
  struct Connection;

  HttpListener(int socket, int port, const Options& options, Handler handler);
  void Run();
  int Patience() const;  // milliseconds to the first deadline
  void Accept(std::chrono::steady_clock::time_point now);
  bool Serve(Connection& connection);  // false once it is over
  void Answer(Connection& connection);

  const int socket_;
  const int port_;
  const Options options_;
  const Handler handler_;
  const int stop_;
  std::list<Connection> connections_;  // oldest first; the thread's, while it runs
  std::thread thread_;
};

}  // namespace treadle
