#include "server/responses/responses_routes.h"

#include <memory>
#include <string>
#include <utility>

#include "base/quoted.h"
#include "base/status.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_call.h"
#include "server/openai/openai_errors.h"
#include "server/responses/response_store.h"
#include "server/responses/responses_answer.h"
#include "server/responses/responses_request.h"

namespace treadle {
namespace {

constexpr std::string_view kPath = "/v1/responses";

class ResponsesApi final : public HttpApi {
 public:
  ResponsesApi(const ServedModel& model, std::string owner, std::shared_ptr<ResponseStore> store)
      : model_(model), owner_(std::move(owner)), store_(std::move(store)) {}

  const char* id_prefix() const override { return "req_"; }
  absl::StatusOr<OpenAiRequest> Read(std::string_view body) override {
    const auto find = [this](const std::string& id) {
      return store_->Find(id, owner_, Clock::now());
    };
    TREADLE_ASSIGN_OR_RETURN(read_, ReadResponsesRequest(body, model_, find));
    return OpenAiRequest(read_);
  }
  std::unique_ptr<HttpAnswer> Answer(const OpenAiRequest& /*request*/, const std::string& /*id*/,
                                     int64_t created) override {
    return std::make_unique<ResponsesAnswer>(model_, read_, NewId("resp_"), created, owner_,
                                             store_);
  }
  HttpResponse Error(const absl::Status& status, const OpenAiRequest* /*request*/) const override {
    return OpenAiError(status, OpenAiKind::kResponse, "max_output_tokens");
  }

 private:
  const ServedModel& model_;
  const std::string owner_;
  const std::shared_ptr<ResponseStore> store_;
  ResponsesRequest read_;
};

// Serves a route below kPath: what the caller may do with the response of that id.
using Act =
    std::function<absl::StatusOr<std::string>(const std::string& id, const std::string& owner)>;
HttpRoute OfKept(const char* method, SessionEnvironment& sessions, Act act) {
  return {method, Str(kPath, "/"),
          [&sessions, act = std::move(act)](HttpRequest request, std::shared_ptr<HttpReply> reply) {
            const std::string_view authorization = request.Header("authorization");
            const absl::Status caller = sessions.Authorize(authorization).status();
            if (!caller.ok()) return reply->Send(OpenAiError(caller));
            const std::string id = request.path.substr(kPath.size() + 1);
            const auto body = act(id, sessions.OwnerOf(authorization).value_or(""));
            reply->Send(body.ok() ? HttpResponse{.content_type = "application/json", .body = *body}
                                  : OpenAiRefusal(404, std::string(body.status().message())));
          }};
}

absl::Status NotKept(const std::string& id) {
  return NotFound("the response ", Quoted(id), " is not kept, expected the id of one that is");
}

}  // namespace

std::vector<HttpRoute> ResponsesRoutes(SessionEnvironment& sessions) {
  const auto store = std::make_shared<ResponseStore>(ResponseStore::Limits());
  const auto generate = [&sessions, store](HttpRequest request, std::shared_ptr<HttpReply> reply) {
    // A caller who may not call is told so later.
    std::string owner = sessions.OwnerOf(request.Header("authorization")).value_or("");
    StartCall(sessions, std::make_unique<ResponsesApi>(sessions.model, std::move(owner), store),
              std::move(request), std::move(reply));
  };
  const auto get = [store](const std::string& id,
                           const std::string& owner) -> absl::StatusOr<std::string> {
    const auto kept = store->Find(id, owner, Clock::now());
    if (kept == nullptr) return NotKept(id);
    return kept->body;
  };
  const auto remove = [store](const std::string& id,
                              const std::string& owner) -> absl::StatusOr<std::string> {
    if (!store->Delete(id, owner, Clock::now())) return NotKept(id);
    return Str(R"({"id":)", JsonString(id), R"(,"object":"response","deleted":true})");
  };
  return {{"POST", std::string(kPath), generate},
          OfKept("GET", sessions, get),
          OfKept("DELETE", sessions, remove)};
}

}  // namespace treadle
