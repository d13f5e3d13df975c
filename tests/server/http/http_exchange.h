// One request to a server of HTTP on 127.0.0.1 and its answer, with JSON bodies, for tests.
#pragma once

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>

#include "base/status.h"
#include "tests/server/http/http_client.h"

namespace treadle {

inline const std::string kClose = "Connection: close\r\n";

// `method_and_path`: "GET /v1/models"; `headers`: lines that end with \r\n.
inline std::string HttpRequestText(const std::string& method_and_path, const std::string& body = "",
                                   const std::string& headers = "") {
  return Str(method_and_path, " HTTP/1.1\r\nHost: localhost\r\n", headers,
             "Content-Length: ", body.size(), "\r\n\r\n", body);
}

struct HttpExchange {
  int code = 0;      // 0: there was no answer
  std::string head;  // each of its lines ends with \r\n
  std::string text;  // the body; of a stream with the sizes of its chunks
  nlohmann::json body;
};
inline HttpExchange ReadExchange(const std::string& reply) {
  const size_t end = reply.find("\r\n\r\n");
  if (end == std::string::npos) return {};
  HttpExchange answer{.code = std::atoi(reply.c_str() + sizeof "HTTP/1.1"),
                      .head = reply.substr(0, end + 2),
                      .text = reply.substr(end + 4)};
  answer.body = nlohmann::json::parse(answer.text, nullptr, /*allow_exceptions=*/false);
  return answer;
}
// The whole answer.
inline std::string ExchangeText(int port, const std::string& method_and_path,
                                const std::string& body = "", const std::string& headers = "") {
  HttpClient client(port);
  client.Send(HttpRequestText(method_and_path, body, headers + kClose));
  return client.ReadAll();
}
inline HttpExchange Exchange(int port, const std::string& method_and_path,
                             const std::string& body = "", const std::string& headers = "") {
  return ReadExchange(ExchangeText(port, method_and_path, body, headers));
}

}  // namespace treadle
