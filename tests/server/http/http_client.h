// A client of HTTP on 127.0.0.1, for tests: it decides which bytes go out and when. Every wait ends
// after a minute. Not thread-safe.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>

namespace treadle {

class HttpClient {
 public:
  explicit HttpClient(int port, int receive_buffer = 0)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    timeval patience{.tv_sec = 60, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (receive_buffer > 0) {
      setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
    }
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~HttpClient() { Close(); }
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  bool connected() const { return connected_; }
  void Send(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {  // it may be closed by now
      const ssize_t count = send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return;
      sent += static_cast<size_t>(count);
    }
  }
  // Until `text` has come; what came up to and with it. All there was, if the server closed.
  std::string ReadUntil(const std::string& text) {
    while (in_.find(text) == std::string::npos && Receive()) {
    }
    const size_t at = in_.find(text);
    return Take(at == std::string::npos ? in_.size() : at + text.size());
  }
  // One answer with a Content-Length: head and body.
  std::string ReadAnswer() {
    std::string head = ReadUntil("\r\n\r\n");
    const size_t at = head.find("Content-Length: ");
    const size_t size =
        at == std::string::npos ? 0 : std::strtoul(head.c_str() + at + 16, nullptr, 10);
    while (in_.size() < size && Receive()) {
    }
    return head + Take(std::min(size, in_.size()));
  }
  // Until the server closes.
  std::string ReadAll() {
    while (Receive()) {
    }
    return Take(in_.size());
  }
  // Says that nothing more is sent; answers are still read.
  void EndSending() const { shutdown(fd_, SHUT_WR); }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  bool Receive() {
    char buffer[16384];
    const ssize_t count = recv(fd_, buffer, sizeof buffer, 0);
    if (count > 0) in_.append(buffer, static_cast<size_t>(count));
    return count > 0;
  }
  std::string Take(size_t size) {
    std::string taken = in_.substr(0, size);
    in_.erase(0, size);
    return taken;
  }

  int fd_;
  bool connected_ = false;
  std::string in_;
};

}  // namespace treadle
