// One request of HTTP/1, while its bytes come in; by Boost.Beast. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "server/http/http_server.h"

namespace treadle {

class HttpParser {
 public:
  HttpParser(size_t head_bytes, uint64_t body_bytes);
  ~HttpParser();

  struct Refusal {
    int code;
    std::string message;
  };
  // Takes what `bytes` begins with, up to the end of the request, and removes it. A refusal: what
  // follows has no meaning.
  std::optional<Refusal> Take(std::string& bytes);

  bool has_head() const;
  bool whole() const;
  size_t body_bytes() const;  // that have come

  // Once it has a head.
  unsigned version() const;  // 10 or 11
  bool keep_alive() const;
  bool expects_continue() const;
  std::string method() const;
  // Once it is whole; but for peer and arrival.
  HttpRequest Release();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace treadle
