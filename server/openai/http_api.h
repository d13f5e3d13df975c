// The words of one HTTP API that generates: how its body is read, and how an answer or an error is
// told. All else of a call is the same for every API (openai_call.h).
//
// Thread safety: an HttpApi is of one call, which calls it from one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/http/http_server.h"
#include "server/openai/openai_request.h"
#include "server/session/session.h"

namespace treadle {

// One answer in the making: what the sessions of its prompts give, in pieces for a stream, or as a
// whole.
class HttpAnswer {
 public:
  virtual ~HttpAnswer() = default;
  // For a stream: events have ids, ID:1 for the first, and the first so many are not told.
  virtual void NumberEvents(uint64_t /*from*/) {}
  // Takes what is new of a prompt. True: its candidate has no more to say, and shall end.
  virtual bool Add(size_t prompt, const SessionEvent& event) = 0;
  // For a stream: server-sent events for what was added since the last call; may be empty.
  virtual std::string TakeEvents() = 0;
  // Its last ones, once all prompts have ended.
  virtual std::string LastEvents() = 0;
  // Or the answer, then.
  virtual std::string Whole() const = 0;
  // For a stream that had begun: the event that ends it. `error`: HttpApi::Error's.
  virtual std::string ErrorEvent(const HttpResponse& error) = 0;
};

class HttpApi {
 public:
  virtual ~HttpApi() = default;
  // Begins the ids of requests that the client does not name.
  virtual const char* id_prefix() const = 0;
  // The header that tells the request's id.
  virtual const char* id_header() const { return "X-Request-Id"; }
  // The name that --durable has for its requests; null: it keeps none.
  virtual const char* stored_kind() const { return nullptr; }
  virtual absl::StatusOr<OpenAiRequest> Read(std::string_view body) = 0;
  // `created`: seconds since 1970.
  virtual std::unique_ptr<HttpAnswer> Answer(const OpenAiRequest& request, const std::string& id,
                                             int64_t created) = 0;
  // `request`: what was read; null: nothing yet.
  virtual HttpResponse Error(const absl::Status& status, const OpenAiRequest* request) const = 0;
};

}  // namespace treadle
