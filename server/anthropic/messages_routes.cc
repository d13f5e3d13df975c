#include "server/anthropic/messages_routes.h"

#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/anthropic/messages_answer.h"
#include "server/anthropic/messages_request.h"
#include "server/openai/openai_call.h"

namespace treadle {
namespace {

constexpr char kIdHeader[] = "request-id";

class MessagesApi final : public HttpApi {
 public:
  explicit MessagesApi(const ServedModel& model) : model_(model) {}

  const char* id_prefix() const override { return "req_"; }
  const char* id_header() const override { return kIdHeader; }
  absl::StatusOr<OpenAiRequest> Read(std::string_view body) override {
    return ReadMessagesRequest(body, model_);
  }
  std::unique_ptr<HttpAnswer> Answer(const OpenAiRequest& request, const std::string& /*id*/,
                                     int64_t /*created*/) override {
    return std::make_unique<MessagesAnswer>(model_, request, NewId("msg_"));
  }
  HttpResponse Error(const absl::Status& status, const OpenAiRequest* /*request*/) const override {
    return MessagesError(status);
  }

 private:
  const ServedModel& model_;
};

HttpRequest WithKey(HttpRequest request) {
  const std::string key(request.Header("x-api-key"));
  if (!key.empty() && request.Header("authorization").empty()) {
    request.headers["authorization"] = "Bearer " + key;
  }
  return request;
}

absl::StatusOr<std::string> CountTokens(std::string_view body, const ServedModel& model) {
  TREADLE_ASSIGN_OR_RETURN(const OpenAiRequest read,
                           ReadMessagesRequest(body, model, /*counting=*/true));
  GenerateRequest asked = read.For(0);
  TREADLE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                           PromptIds(asked, model, Clock::time_point::max()));
  return Str(R"({"input_tokens":)", ids.size(), "}");
}

}  // namespace

std::vector<HttpRoute> MessagesRoutes(SessionEnvironment& sessions) {
  const auto generate = [&sessions](HttpRequest request, std::shared_ptr<HttpReply> reply) {
    StartCall(sessions, std::make_unique<MessagesApi>(sessions.model), WithKey(std::move(request)),
              std::move(reply));
  };
  const auto count = [&sessions](HttpRequest given, std::shared_ptr<HttpReply> reply) {
    const auto request = std::make_shared<const HttpRequest>(WithKey(std::move(given)));
    const auto send = [reply](const absl::StatusOr<std::string>& body) {
      reply->Send(body.ok() ? HttpResponse{.content_type = "application/json", .body = *body}
                            : MessagesError(body.status()));
    };
    const absl::Status status = sessions.Submit(
        request->Header("authorization"), {.client = request->peer}, request->body.size(),
        [request, send, &sessions] {
          const absl::StatusOr<std::string> body = CountTokens(request->body, sessions.model);
          sessions.refusals->Add(body.status()).IgnoreError();
          send(body);
        });
    if (!status.ok()) send(status);
  };
  return {{"POST", "/v1/messages", generate}, {"POST", "/v1/messages/count_tokens", count}};
}

}  // namespace treadle
