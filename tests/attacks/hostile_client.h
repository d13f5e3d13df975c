// A client of HTTP/2 that says what it likes, frame by frame. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "net/http2_guard.h"

namespace treadle {

// A frame's bytes (RFC 9113, section 4.1).
std::string Http2Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload);
// The header block of a call, without Huffman's code and without a table.
std::string CallHeaders(const std::string& method);
// A message's prefix of flags and length.
std::string MessagePrefix(bool compressed, uint32_t length);

class HostileClient {
 public:
  // Connects to 127.0.0.1; no wait lasts longer than `patience_seconds`.
  explicit HostileClient(int port, int patience_seconds = 10);
  ~HostileClient();
  HostileClient(const HostileClient&) = delete;
  HostileClient& operator=(const HostileClient&) = delete;

  bool connected() const { return socket_ >= 0; }
  // False once the server has closed, or takes nothing for as long as the patience.
  bool Send(std::string_view bytes);
  bool Greet();  // preface and empty settings
  // A call's HEADERS.
  bool Call(uint32_t stream, const std::string& method);
  // A call's DATA, in frames of 16 KiB, as fast as the server's flow control allows. False if it
  // allows no more within the patience.
  bool SendData(uint32_t stream, std::string_view bytes);
  // Text of the server until `text` is in it, or it closes, or the patience ends.
  std::string ReadUntil(std::string_view text);

 private:
  bool Receive();

  int socket_;
  std::string heard_;                    // all that the server has said
  Http2Frames frames_;                   // of it
  std::string payload_;                  // of the frame that comes in
  int64_t window_ = 65535;               // bytes that the connection may still send
  int64_t first_window_ = 65535;         // that a stream may send
  std::map<uint32_t, int64_t> windows_;  // what was added to that, or sent
};

}  // namespace treadle
