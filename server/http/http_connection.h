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

namespace treadle {

class HttpConnection;

// Everybody who is connected.
class HttpHouse {
 public:
  // Owns `listener`.
  HttpHouse(int listener, const HttpOptions& options, std::vector<HttpRoute> routes);

  // Closes every connection; the loop ends once all replies were given up.
  void Close();

  const HttpOptions& options() const { return options_; }
  EventLoop& loop() const { return *loop_; }

 private:
  friend class HttpConnection;

  void Enter(Newcomer newcomer);
  // Closes a connection of `host`: the oldest that has not begun a request, but not one of the
  // latest newcomers_, whose words may be on their way; else the oldest whose request is not whole;
  // else the oldest of those newcomers. False: all have a whole request, or bytes that were not
  // read yet.
  bool MakeRoom(const std::string& host);
  void Leave(uint64_t id, const std::string& host);
  // Bytes of unfinished bodies have come, or gone.
  void Count(uint64_t added, uint64_t removed);
  void Sweep();
  void Gone();  // a connection's end, after that of all its replies

  const HttpOptions options_;
  const std::vector<HttpRoute> routes_;
  // How many who came last are given time to ask; so many are admitted in a turn of the loop.
  const size_t newcomers_;
  // Replies keep it, so that they can be given up at any time.
  const std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>();
  Admission admission_;
  std::map<uint64_t, std::shared_ptr<HttpConnection>> connections_;  // by age
  uint64_t next_ = 1;
  uint64_t receiving_ = 0;
  size_t alive_ = 0;  // connections, closed ones with replies among them
  bool closed_ = false;
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  HttpConnection(HttpHouse& house, uint64_t id, Newcomer newcomer);
  ~HttpConnection() { house_.Gone(); }
  void Start();

  const std::string& host() const { return host_; }
  uint64_t id() const { return id_; }  // by age
  // False while a whole request, or bytes that nobody has read yet, wait for an answer.
  bool expendable() const {
    return stage_ == kClosing || (stage_ != kAnswering && !HasUnread(socket_->fd()));
  }
  // Has begun no request, or has its last answer.
  bool silent() const { return stage_ == kClosing || (stage_ != kBody && !begun_); }
  uint64_t receiving() const { return receiving_; }
  void Look(TimePoint now);  // at its deadline
  // Answers in a handler's place, and closes.
  void Refuse(int code, const std::string& message);
  void Close();

  // The parts of the reply to request `number`.
  void Begin(uint64_t number, const HttpResponse& response, bool whole);
  void Write(uint64_t number, std::string_view bytes, HttpReply::Written written);
  void End(uint64_t number, HttpReply::Done done);
  void Break(uint64_t number) {
    if (Open(number)) Close();
  }

 private:
  friend class HttpReplyOf;
  enum Stage { kHead, kBody, kAnswering, kClosing, kClosed };

  // Whether the answer to that request is not at its end.
  bool Open(uint64_t number) const { return stage_ == kAnswering && number == number_ && !ended_; }
  void NextRequest();
  void Serve();  // its socket is ready
  void Read();
  void OnRead(std::string_view bytes);
  void Parse();
  void OnHead();
  void Count(uint64_t received);
  void Handle();
  // Sends in the next turn of the loop, with all that this one still writes.
  void Flush();
  void Send();
  void DelayStall();     // a client that reads has all its time again
  void Tell(bool sent);  // those who wait for what is on its way
  void OnWritten();
  void Linger();
  void Arm();
  void OnEnd();  // the client has sent all

  HttpHouse& house_;
  const uint64_t id_;
  const std::string host_, peer_;
  std::unique_ptr<ClientSocket> socket_;  // null once it is closed
  std::optional<EventLoop::Watch> watch_;
  short reads_ = 0, writes_ = 0;  // what a read and a write wait for
  TimePoint deadline_ = TimePoint::max();

  Stage stage_ = kHead;
  bool reading_ = false, begun_ = false, input_over_ = false;
  std::string in_;  // that is not parsed yet
  std::optional<HttpParser> parser_;
  uint64_t receiving_ = 0;  // as counted in the house's
  bool said_all_ = false;   // when closing: to the client
  int discarded_ = 0;       // reads since then
  TimePoint arrival_;

  // The number of the request under way.
  uint64_t number_ = 0;
  bool keep_alive_ = false, head_only_ = false, chunked_ = false, ended_ = false;
  bool answer_begun_ = false;  // its first bytes were sent, which are always the same
  unsigned version_ = 11;
  std::function<void()> closed_;
  std::optional<std::string> filler_;  // of the body that was begun
  std::string cors_;                   // lines of its answer's head, for a page of somebody else

  bool writing_ = false;
  std::string out_, going_;  // what waits, and what is on its way
  size_t sent_ = 0;          // of that
  std::vector<HttpReply::Written> out_told_, going_told_;
};

}  // namespace treadle
