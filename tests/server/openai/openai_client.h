// Calls of OpenAI's API on a TestServer.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/server/http/http_exchange.h"
#include "tests/server/test_server.h"

namespace treadle {

inline constexpr char kCompletions[] = "/v1/completions";
inline constexpr char kChat[] = "/v1/chat/completions";

inline std::string PostText(const std::string& path, const std::string& body,
                            const std::string& headers = "") {
  return HttpRequestText("POST " + path, body, headers);
}
inline HttpExchange Post(const TestServer& server, const std::string& path, const std::string& body,
                         const std::string& headers = "") {
  return Exchange(server.http_port(), "POST " + path, body, headers);
}
inline HttpExchange Get(const TestServer& server, const std::string& path) {
  return Exchange(server.http_port(), "GET " + path);
}

// Events of a stream; one that is no JSON ("[DONE]") is a string.
inline std::vector<nlohmann::json> EventsIn(const std::string& stream) {
  std::vector<nlohmann::json> events;
  const std::string before = "data: ";
  for (size_t at = 0; (at = stream.find(before, at)) != std::string::npos;) {
    at += before.size();
    const std::string data = stream.substr(at, stream.find("\n\n", at) - at);
    nlohmann::json event = nlohmann::json::parse(data, nullptr, /*allow_exceptions=*/false);
    events.push_back(event.is_discarded() ? nlohmann::json(data) : event);
  }
  return events;
}
inline std::vector<nlohmann::json> Stream(const TestServer& server, const std::string& path,
                                          const std::string& body) {
  return EventsIn(Post(server, path, body).text);
}

}  // namespace treadle
