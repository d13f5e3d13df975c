// Sockets and time for the HTTP server, by Boost.Asio: callbacks, all on the thread that runs the
// loop, and never from within the call that asked for them.
//
// Thread safety: Post and KeepRunning from any thread; the rest from the loop's, or before it runs.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>  // for Asio, which forgets it

#include "net/client_socket.h"

namespace treadle {

class HttpLoop {
 public:
  using Task = std::function<void()>;

  HttpLoop();
  ~HttpLoop();

  // Until nothing is waited for, and what KeepRunning gave is gone.
  void Run();
  void Post(Task task);
  std::shared_ptr<void> KeepRunning();
  // One timer: a later call takes the place of an earlier one.
  void After(std::chrono::milliseconds time, Task task);
  // Whenever the descriptor `fd` can be read. Owns it.
  void WhenReadable(int fd, Task task);
  // Forgets the timer and closes the descriptor.
  void Stop();

 private:
  friend class HttpStream;
  struct State;
  void WaitReadable();

  const std::unique_ptr<State> state_;
};

// A connection, plain or TLS. One Read and one Write at a time; whoever is told must keep it.
class HttpStream {
 public:
  using Then = std::function<void(bool ok)>;

  // Owns `fd`. With `tls`, under the certificate that is in force now. Null: there is no memory.
  static std::unique_ptr<HttpStream> Open(HttpLoop& loop, int fd, const SocketTls* tls);
  ~HttpStream();

  bool tls() const;
  void Handshake(Then then);
  // Some bytes; none: the end. `raw`: as they are, beside TLS.
  void Read(bool raw, std::function<void(std::string_view bytes)> then);
  // `bytes` must stay until `then`; `progress` whenever some are gone.
  void Write(std::string_view bytes, std::function<void()> progress, Then then);
  // Says that nothing more will come.
  void End(bool greeted, Then then);
  // What is under way ends with false, or without bytes.
  void Close();

 private:
  struct State;
  explicit HttpStream(std::unique_ptr<State> state);
  const std::unique_ptr<State> state_;
};

}  // namespace treadle
