// A client of one HTTP/1.1 server, plain or TLS, for many requests at a time: each gets a
// connection of its own, a new one where none is idle, so that no request waits for another.
//
// Thread safety: Call and Get from any thread. Handlers run on this object's own thread, one at a
// time, and must not block; Get must not be called from them.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "net/event_loop.h"

struct ssl_ctx_st;

namespace treadle {

struct HttpUrl {
  bool tls = false;
  std::string host;
  int port = 0;
  std::string path;  // without a slash at its end
};
// "http://host:port/path", "https://host", "host:port" (http). InvalidArgument otherwise.
absl::StatusOr<HttpUrl> ParseHttpUrl(std::string_view text);

struct HttpHandlers {
  std::function<void()> sent;                                    // all bytes are with the system
  std::function<void(int status, std::string_view bytes)> body;  // a piece of the answer's body
  // Once, at the end: OK where the answer is whole, whatever its status. DeadlineExceeded.
  std::function<void(int status, const absl::Status& end)> ended;
};

class HttpCaller {
 public:
  // Resolves the host. `tls`: verifies a server's certificate; needed for https. `authorization`:
  // of every request; empty: none. NotFound: no such host.
  static absl::StatusOr<std::unique_ptr<HttpCaller>> Open(const HttpUrl& url,
                                                          std::shared_ptr<ssl_ctx_st> tls,
                                                          const std::string& authorization);
  // Requests that are under way end with Cancelled.
  ~HttpCaller();

  // `path`: behind the URL's. An empty `body`: GET; else POST of JSON.
  void Call(const std::string& path, const std::string& body, std::chrono::milliseconds timeout,
            HttpHandlers handlers);
  // Waits for the body of an answer 200. Errors: Unavailable with any other status, and why.
  absl::StatusOr<std::string> Get(const std::string& path, std::chrono::milliseconds timeout);

 private:
  class Connection;
  struct Request;
  struct Place;  // where the server is

  HttpCaller(std::unique_ptr<Place> place, std::string head);
  void Begin(std::shared_ptr<Request> request);
  void Remove(Connection* connection);
  void EndLate();

  const std::unique_ptr<const Place> place_;
  const std::string head_;  // lines of every request's head
  EventLoop loop_;
  std::map<Connection*, std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> idle_;
  std::thread thread_;  // last
};

}  // namespace treadle
