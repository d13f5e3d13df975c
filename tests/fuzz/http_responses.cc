// Answers of HTTP servers to the load client, and the server-sent events in them: however the bytes
// are cut, the body and its events are the same.
#include <algorithm>

#include "base/status.h"
#include "bench/load/http_response.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

// The response read from `bytes`, in pieces of `size`: the body, its events, and how it ended.
std::string ReadIn(std::string_view bytes, size_t size) {
  HttpResponseParser answer;
  EventStreamParser stream;
  std::string body, events;
  for (size_t at = 0; at < bytes.size() && !answer.done();) {
    const auto taken = answer.Feed(bytes.substr(at, size), [&](std::string_view piece) {
      TREADLE_CHECK(!piece.empty());
      body += piece;
      TREADLE_CHECK(
          stream.Feed(piece, [&](std::string_view data) { events += Str(data, "|"); }).ok());
    });
    if (!taken.ok()) return body + "!" + events;
    TREADLE_CHECK(*taken <= size && (*taken > 0 || answer.done()));
    at += *taken;
  }
  return Str(body, answer.End().ok() ? "." : "?", events, answer.status(), answer.keep_alive());
}

void Run(std::string_view bytes) {
  const std::string whole = ReadIn(bytes, std::max<size_t>(bytes.size(), 1));
  for (const size_t size : {1, 3}) TREADLE_CHECK(ReadIn(bytes, size) == whole);
}

std::vector<std::string> Seeds() {
  return {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
          "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
          "8;a=b\r\ndata: x\n\r\n3\r\n\r\n\n\r\n0\r\nX-Trailer: 1\r\n\r\n",
          "HTTP/1.0 200 OK\nConnection: close\n\n: comment\r\ndata: {\"a\"\r\ndata: 1}\r\n\r\nid: "
          "7\rdata\r\r"};
}

}  // namespace

const FuzzTarget kHttpResponsesTarget = {"http_responses", 512, Seeds, Run};

}  // namespace treadle
