// A client of the HTTP server, and all of them: who is let in, what each may take, and its requests
// one after another. Private to the server.
//
// Thread safety: the loop's thread; replies from any.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/http/http_parser.h"
#include "server/http/http_server.h"
#include "server/http/http_stream.h"

namespace treadle {

class HttpConnection;

// Everybody who is connected.
class HttpHouse {
 public:
  HttpHouse(const HttpOptions& options, std::vector<HttpRoute> routes);

  // Owns `fd`.
  void Admit(int fd, const std::string& host, const std::string& peer);
  // Closes the oldest connection without a request under way, of `host`; empty: of the one that has
  // most. False: there is none.
  bool MakeRoom(const std::string& host);
  void CloseAll();

  const HttpOptions& options() const { return options_; }
  HttpLoop& loop() const { return *loop_; }

 private:
  friend class HttpConnection;

  void Remove(uint64_t id, const std::string& host);
  // Bytes of unfinished bodies have come, or gone.
  void Count(uint64_t added, uint64_t removed);
  void Sweep();

  HttpOptions options_;
  const std::vector<HttpRoute> routes_;
  // Replies keep it, so that they can be given up at any time.
  const std::shared_ptr<HttpLoop> loop_ = std::make_shared<HttpLoop>();
  std::map<uint64_t, std::shared_ptr<HttpConnection>> connections_;  // by age
  std::map<std::string, size_t> of_host_;
  uint64_t next_ = 1;
  uint64_t receiving_ = 0;
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  HttpConnection(HttpHouse& house, uint64_t id, std::unique_ptr<HttpStream> stream,
                 std::string host, std::string peer);
  void Start();

  const std::string& host() const { return host_; }
  bool idle() const { return stage_ != kAnswering; }
  uint64_t receiving() const { return receiving_; }
  void Look(TimePoint now);  // at its deadline
  // Answers in a handler's place, and closes.
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
  friend class HttpReplyOf;
  enum Stage { kHandshake, kHead, kBody, kAnswering, kClosing, kClosed };

  // Whether the answer to that request is not at its end.
  bool Open(uint64_t number) const { return stage_ == kAnswering && number == number_ && !ended_; }
  void NextRequest();
  void Read();
  void OnRead(std::string_view bytes);
  void Parse();
  void OnHead();
  void Count(uint64_t received);
  void Handle();
  void Flush();
  void OnWritten(bool sent);
  void Linger();

  HttpHouse& house_;
  const uint64_t id_;
  const std::string host_, peer_;
  const std::unique_ptr<HttpStream> stream_;
  const std::shared_ptr<void> keeps_running_;
  TimePoint deadline_ = TimePoint::max();

  Stage stage_ = kHead;
  bool reading_ = false;
  std::string in_;  // that is not parsed yet
  std::optional<HttpParser> parser_;
  uint64_t receiving_ = 0;  // as counted in the house's
  int discarded_ = 0;
  TimePoint arrival_;

  // Of the request under way.
  uint64_t number_ = 0;
  bool keep_alive_ = false, head_only_ = false, chunked_ = false, ended_ = false;
  unsigned version_ = 11;
  std::function<void()> closed_;
  std::string cors_;  // lines of its answer's head, for a page of somebody else

  bool writing_ = false;
  std::string out_, going_;  // what waits, and what is on its way
  std::vector<HttpReply::Written> out_told_, going_told_;
};

}  // namespace treadle
