// A client of TLS on 127.0.0.1, for tests: it decides which bytes go out and when. Every wait ends
// after a minute. Not thread-safe.
#pragma once

#include <memory>
#include <string>

#include "tests/server/access/test_certificates.h"

namespace treadle {

struct TlsClientOptions {
  std::string ca = {};  // PEM: whose certificate the server must have
  PemPair own = {};     // empty: none
  int version = 0;      // the only one it speaks, as OpenSSL counts; 0: any from 1.2
  size_t piece = 0;     // bytes that go out at once; 0: all
};

class TlsClient {
 public:
  TlsClient(int port, const TlsClientOptions& options);
  ~TlsClient();

  // Only the first bytes of the handshake, at most all of its first message.
  void SendPartOfHello(double share);
  bool Handshake();
  void Send(const std::string& text);
  // Says that nothing more is sent; answers are still read.
  void EndSending();
  // Text that was sent, until the server says that this is the end; "" and error() if it does not.
  std::string ReadAll() { return ReadUntil(""); }
  // The same up to what ends with `text`.
  std::string ReadUntil(const std::string& text);
  // Bytes as they are, beside TLS.
  void SendRaw(const std::string& bytes);
  // Until the server closes; ends with "no end" if it does not.
  std::string ReadRaw();

  // Ends the connection without a word.
  void Reset();

  const std::string& error() const { return error_; }
  // The serial number of the server's certificate; 0: there is none yet.
  long serial() const;

 private:
  struct State;
  template <typename Operation>
  bool Do(const Operation& operation);
  void Flush();
  bool Receive();

  const std::unique_ptr<State> state_;
  std::string error_;
};

// One request on a connection of its own; the whole reply, or "" and why in `error`.
std::string HttpsGet(int port, const TlsClientOptions& options, const std::string& path,
                     const std::string& headers = "", std::string* error = nullptr);

}  // namespace treadle
