#include "tests/attacks/hostile_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

namespace treadle {
namespace {

std::string BigEndian(uint32_t value, int bytes) {
  std::string out;
  for (int i = bytes - 1; i >= 0; --i) out += static_cast<char>(value >> (8 * i));
  return out;
}

std::string Short(std::string_view text) {  // of HPACK: below 127 bytes
  return static_cast<char>(text.size()) + std::string(text);
}

}  // namespace

std::string Http2Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  return BigEndian(static_cast<uint32_t>(payload.size()), 3) + static_cast<char>(type) +
         static_cast<char>(flags) + BigEndian(stream, 4) + std::string(payload);
}

std::string CallHeaders(const std::string& method) {
  using namespace std::string_literals;
  return "\x83\x86"s +                                     // :method POST, :scheme http
         "\x04"s + Short(method) + "\x01"s + Short("x") +  // :path, :authority
         "\x0f\x10"s + Short("application/grpc") +         // content-type
         "\x00"s + Short("te") + Short("trailers");
}

std::string MessagePrefix(bool compressed, uint32_t length) {
  return static_cast<char>(compressed) + BigEndian(length, 4);
}

HostileClient::HostileClient(int port, int patience_seconds)
    : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const timeval patience = {.tv_sec = patience_seconds, .tv_usec = 0};
  setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    close(socket_);
    socket_ = -1;
  }
}

HostileClient::~HostileClient() {
  if (connected()) close(socket_);
}

bool HostileClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

bool HostileClient::Greet() {
  return Send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + Http2Frame(4, 0, 0, ""));
}

bool HostileClient::Call(uint32_t stream, const std::string& method) {
  return Send(Http2Frame(1, 4, stream, CallHeaders(method)));
}

bool HostileClient::SendData(uint32_t stream, std::string_view bytes) {
  while (!bytes.empty()) {
    const int64_t room = std::min(window_, first_window_ + windows_[stream]);
    if (room <= 0) {
      if (!Receive()) return false;
      continue;
    }
    const std::string_view piece =
        bytes.substr(0, static_cast<size_t>(std::min<int64_t>(room, 16384)));
    if (!Send(Http2Frame(0, 0, stream, piece))) return false;
    bytes.remove_prefix(piece.size());
    window_ -= static_cast<int64_t>(piece.size());
    windows_[stream] -= static_cast<int64_t>(piece.size());
  }
  return true;
}

bool HostileClient::Receive() {
  char buffer[16384];
  const ssize_t count = recv(socket_, buffer, sizeof buffer, 0);
  if (count <= 0) return false;
  heard_.append(buffer, static_cast<size_t>(count));
  std::string_view bytes(buffer, static_cast<size_t>(count));
  while (!bytes.empty()) {
    const Http2Frames::Piece piece = frames_.Next(bytes);
    if (!piece.header) payload_ += piece.bytes;
    if (!piece.ends) continue;
    const Http2Frames::Frame& frame = frames_.frame();
    const auto number = [&](size_t at) {
      uint32_t value = 0;
      for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(payload_[at + i]);
      return value;
    };
    if (frame.type == 8) (frame.stream == 0 ? window_ : windows_[frame.stream]) += number(0);
    for (size_t at = 0; frame.type == 4 && at + 6 <= payload_.size(); at += 6) {
      if (payload_[at] == 0 && payload_[at + 1] == 4) first_window_ = number(at + 2);
    }
    if (frame.type == 4 && frame.flags == 0 && !Send(Http2Frame(4, 1, 0, ""))) return false;
    payload_.clear();
  }
  return true;
}

std::string HostileClient::ReadUntil(std::string_view text) {
  while (heard_.find(text) == std::string::npos && Receive()) {
  }
  return heard_;
}

}  // namespace treadle
