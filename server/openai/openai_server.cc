#include "server/openai/openai_server.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/status.h"
#include "base/version.h"
#include "server/openai/adapter_routes.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_call.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"

namespace treadle {
namespace {

using Answer = std::function<absl::StatusOr<std::string>()>;  // a body of JSON

HttpResponse Response(const HttpRequest& request, const absl::StatusOr<std::string>& body) {
  HttpResponse response = body.ok()
                              ? HttpResponse{.content_type = "application/json", .body = *body}
                              : OpenAiError(body.status());
  if (const std::string_view id = request.Header("x-request-id"); !id.empty()) {
    response.headers.push_back({"X-Request-Id", PrintableId(id)});
  }
  return response;
}

RefusalReason ReasonOfHttp(int code) {
  switch (code) {
    case 408:
      return RefusalReason::kDeadline;
    case 413:
    case 431:
      return RefusalReason::kTooLong;
    case 503:
      return RefusalReason::kUnreadFull;
    default:
      return RefusalReason::kInvalid;
  }
}

// Answers at once, if the caller may call.
HttpRoute Get(const std::string& path, SessionEnvironment& sessions, Answer answer) {
  return {"GET", path, [&sessions, answer](const HttpRequest& request, const auto& reply) {
            const absl::Status caller =
                sessions.Authorize(request.Header("authorization")).status();
            reply->Send(Response(request, caller.ok() ? answer() : caller));
          }};
}

// On a thread of the work pool, and charged to the caller's key: for what takes long where the
// request is long.
HttpRoute Work(const std::string& path, SessionEnvironment& sessions,
               std::function<absl::StatusOr<std::string>(std::string_view body)> answer) {
  return {"POST", path, [&sessions, answer](HttpRequest given, std::shared_ptr<HttpReply> reply) {
            const auto request = std::make_shared<const HttpRequest>(std::move(given));
            const absl::Status status = sessions.Submit(
                request->Header("authorization"), {.client = request->peer}, request->body.size(),
                [request, reply, answer, counts = sessions.refusals] {
                  const absl::StatusOr<std::string> body = answer(request->body);
                  counts->Add(body.status()).IgnoreError();
                  reply->Send(Response(*request, body));
                });
            if (!status.ok()) reply->Send(Response(*request, status));
          }};
}

// Asks for no key, as the probes of gRPC.
HttpRoute ProbeRoute(const std::string& path, const HealthBoard& health, Probe probe) {
  return {"GET", path, [&health, probe](const HttpRequest&, const auto& reply) {
            const bool serving = health.Get(probe);
            reply->Send({.code = serving ? 200 : 503,
                         .content_type = "application/json",
                         .body = serving ? R"({"status":"ok"})" : R"({"status":"not serving"})"});
          }};
}

absl::Status NoTokenizer() {
  return absl::FailedPreconditionError("this model has no tokenizer: it serves token ids only");
}

absl::StatusOr<std::string> Tokenize(const ServedModel& model, std::string_view body) {
  if (!model.tokenizer) return NoTokenizer();
  TREADLE_ASSIGN_OR_RETURN(const TokenizeQuestion question, ReadTokenize(body, model));
  const auto ids = model.tokenizer->Encode(question.text, {.add_special = question.add_special});
  if (!ids.ok()) return InvalidArgument("prompt: ", ids.status().message());
  return Str(R"({"count":)", ids->size(), R"(,"max_model_len":)", model.max_context,
             R"(,"tokens":)", JsonIds(*ids), "}");
}

absl::StatusOr<std::string> Detokenize(const ServedModel& model, size_t most,
                                       std::string_view body) {
  if (!model.tokenizer) return NoTokenizer();
  TREADLE_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ReadDetokenize(body, model));
  TREADLE_RETURN_IF_ERROR(ValidateTokenIds("tokens", ids, model.vocab));
  // A text is as long as /tokenize would take it.
  const std::string text = model.tokenizer->Decode(ids, /*special=*/true, most);
  if (text.size() > most) {
    return InvalidArgument("tokens: their text has more than ", most,
                           " bytes (the server's --max-request-bytes), expected fewer ids");
  }
  return R"({"prompt":)" + JsonString(text) + "}";
}

// vLLM's answer of this name, for clients that render and tokenize by the server.
absl::StatusOr<std::string> TokenizerInfo(const ServedModel& model) {
  if (!model.tokenizer) return NoTokenizer();
  const TokenizerSpec& spec = model.tokenizer->spec();
  std::string info =
      R"({"chat_template":)" +
      (model.chat_template ? JsonString(model.chat_template->source()) : std::string("null"));
  for (const auto& [name, id] :
       {std::pair("bos_token", spec.bos), std::pair("eos_token", spec.eos),
        std::pair("pad_token", spec.padding), std::pair("unk_token", spec.unknown)}) {
    info += Str(",\"", name, "\":", id < 0 ? "null" : JsonString(spec.tokens[id].text));
  }
  return info + "}";
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> StartOpenAi(const std::string& listen,
                                                        HttpOptions options,
                                                        SessionEnvironment& sessions,
                                                        const HealthBoard& health,
                                                        std::vector<HttpRoute> others) {
  const ServedModel& model = sessions.model;
  const auto generate = [&sessions](const std::string& path, OpenAiKind kind) {
    return HttpRoute{"POST", path, [&sessions, kind](HttpRequest request, auto reply) {
                       StartOpenAiCall(sessions, kind, std::move(request), std::move(reply));
                     }};
  };
  const auto resume = [&sessions](HttpRequest request, std::shared_ptr<HttpReply> reply) {
    if (request.Header("last-event-id").empty()) {
      return reply->Send(OpenAiError(sessions.refusals->Add(
          InvalidArgument("the header Last-Event-ID is missing, expected the id of the last event "
                          "that came"))));
    }
    StartOpenAiCall(sessions, OpenAiKind::kCompletion, std::move(request), std::move(reply));
  };
  std::vector<HttpRoute> routes = {
      generate("/v1/completions", OpenAiKind::kCompletion),
      generate("/v1/chat/completions", OpenAiKind::kChat),
      generate("/v1/embeddings", OpenAiKind::kEmbedding),
      Get("/version", sessions, [] { return Str(R"({"version":")", kVersion, R"("})"); }),
      Work("/tokenize", sessions,
           [&model](std::string_view body) { return Tokenize(model, body); }),
      Work("/detokenize", sessions,
           [&model, most = options.body_bytes](std::string_view body) {
             return Detokenize(model, most, body);
           }),
      Get("/tokenizer_info", sessions, [&model] { return TokenizerInfo(model); }),
      ProbeRoute("/health", health, Probe::kLive),
      ProbeRoute("/ready", health, Probe::kReady)};
  std::ranges::move(ModelRoutes(sessions), std::back_inserter(routes));
  if (sessions.store != nullptr) routes.push_back({"GET", kResumePath, resume});
  std::ranges::move(others, std::back_inserter(routes));
  options.refusal = [counts = sessions.refusals](int code, const std::string& message) {
    counts->Add(ReasonOfHttp(code));
    return OpenAiRefusal(code, message);
  };
  options.any_host = sessions.keys != nullptr;
  options.stall_patience = sessions.stall_timeout;
  return HttpServer::Start(listen, options, std::move(routes));
}

}  // namespace treadle
