#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "base/status.h"
#include "bench/load/http_caller.h"
#include "bench/load/http_response.h"
#include "bench/load/load_target.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kErrorBytes = 300;  // of an answer that is an error

Json Parse(std::string_view text) { return Json::parse(text, nullptr, /*allow_exceptions=*/false); }

// The member at that place, where it is a whole number; else nothing.
std::optional<int64_t> NumberAt(const Json& json, const char* pointer) {
  const Json::json_pointer at(pointer);
  if (!json.contains(at) || !json[at].is_number_integer()) return std::nullopt;
  return json[at].get<int64_t>();
}

// One streamed completion, from its request on.
class Completion {
 public:
  explicit Completion(LoadAnswer& answer) : answer_(answer) {}

  void Body(int status, std::string_view bytes) {
    if (status != 200) {
      error_ += bytes.substr(0, kErrorBytes - error_.size());
      return;
    }
    const absl::Status read = events_.Feed(bytes, [this](std::string_view data) { Event(data); });
    if (!read.ok() && error_.empty()) error_ = std::string(read.message());
  }

  void Ended(int status, const absl::Status& end) {
    if (!end.ok()) return answer_.ended(std::string(end.message()));
    if (status != 200) return answer_.ended(Str("HTTP ", status, ": ", error_));
    if (error_.empty() && !done_) error_ = "the stream ended without [DONE]";
    answer_.ended(std::move(error_));
  }

 private:
  void Event(std::string_view data) {
    if (data == "[DONE]") {
      done_ = true;
      return;
    }
    const Json event = Parse(data);
    if (!event.is_object() || event.contains("error")) {
      if (error_.empty()) error_ = data.substr(0, kErrorBytes);
      return;
    }
    // Tokens are counted by their ids, by the usage up to here, or else by pieces of text.
    const std::optional<int64_t> all = NumberAt(event, "/usage/completion_tokens");
    ids_.clear();
    int64_t tokens = 0;
    if (event.contains("choices") && event["choices"].is_array() && !event["choices"].empty() &&
        event["choices"][0].is_object()) {
      const Json& choice = event["choices"][0];
      if (choice.contains("token_ids") && choice["token_ids"].is_array()) {
        for (const Json& id : choice["token_ids"]) {
          if (id.is_number_integer()) ids_.push_back(id.get<int32_t>());
        }
        tokens = std::ssize(ids_);
      } else if (choice.contains("text") && choice["text"].is_string()) {
        tokens = choice["text"].get_ref<const std::string&>().empty() ? 0 : 1;
      }
    }
    if (all && ids_.empty()) tokens = *all - counted_;
    if (tokens <= 0 || tokens > INT32_MAX) return;
    counted_ += tokens;
    answer_.received(static_cast<int32_t>(tokens), ids_);
  }

  LoadAnswer& answer_;
  EventStreamParser events_;
  std::vector<int32_t> ids_;
  int64_t counted_ = 0;
  bool done_ = false;
  std::string error_;
};

class OpenAiTarget final : public LoadTarget {
 public:
  OpenAiTarget(const LoadServer& server, std::unique_ptr<HttpCaller> caller)
      : target_(server.target), vocab_(server.vocab), caller_(std::move(caller)) {}

  absl::StatusOr<Limits> GetLimits(std::chrono::seconds patience) override {
    const auto give_up = std::chrono::steady_clock::now() + patience;
    absl::StatusOr<std::string> models;
    for (;;) {  // a server that loads refuses connections, or answers 503
      models = caller_->Get("/v1/models", std::chrono::seconds(10));
      if (models.ok() || std::chrono::steady_clock::now() >= give_up) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    if (!models.ok()) {
      return absl::UnavailableError(
          Str(target_, ": /v1/models is not answered: ", models.status().message()));
    }
    const Json list = Parse(*models);
    const Json::json_pointer first("/data/0");
    if (!list.contains(first) || !list[first].is_object() || !list[first].contains("id") ||
        !list[first]["id"].is_string()) {
      return InvalidArgument(target_, ": /v1/models lists no model: ", models->substr(0, 200));
    }
    const Json& model = list[first];
    const auto props = caller_->Get("/props", std::chrono::seconds(10));  // llama.cpp's
    const Json own = props.ok() ? Parse(*props) : Json();
    Limits limits;
    limits.model = model_ = model["id"].get<std::string>();
    limits.max_context =
        NumberAt(model, "/max_model_len")
            .value_or(NumberAt(own, "/default_generation_settings/n_ctx").value_or(INT32_MAX));
    const int64_t vocab =
        NumberAt(model, "/vocab_size").value_or(NumberAt(model, "/meta/n_vocab").value_or(vocab_));
    if (vocab < 1 || vocab > INT32_MAX) {
      return InvalidArgument(target_,
                             ": the server does not say how many tokens its model knows; give "
                             "--vocab-size");
    }
    limits.vocab = static_cast<int32_t>(vocab);
    if (model.contains("sampling_defaults")) {
      const Json& defaults = model["sampling_defaults"];
      limits.sampling_defaults = defaults.is_null() ? "{}" : defaults.dump();
    } else if (const Json::json_pointer at("/default_generation_settings/params");
               own.contains(at) && own[at].is_object()) {
      Json defaults = Json::object();
      for (const char* name : {"temperature", "top_k", "top_p", "min_p", "typical_p",
                               "repeat_penalty", "presence_penalty", "frequency_penalty"}) {
        if (own[at].contains(name)) defaults[name] = own[at][name];
      }
      limits.sampling_defaults = defaults.dump();
    }
    return limits;
  }

  void Send(LoadRequest request, LoadAnswer& answer) override {
    std::string body = Str(R"({"model":)", Json(model_).dump(), R"(,"prompt":[)");
    for (size_t i = 0; i < request.token_ids.size(); ++i) {
      if (i > 0) body += ',';
      body += std::to_string(request.token_ids[i]);
    }
    body +=
        Str(R"(],"max_tokens":)", request.max_new_tokens, R"(,"temperature":)", request.temperature,
            R"(,"stream":true,"stream_options":{"include_usage":true,)",
            R"("continuous_usage_stats":true})", request.ignore_eos ? R"(,"ignore_eos":true)" : "",
            request.wants_ids ? R"(,"return_token_ids":true)" : "", "}");
    auto completion = std::make_shared<Completion>(answer);
    caller_->Call(
        "/v1/completions", body, request.timeout,
        {.sent = [&answer] { answer.sent(); },
         .body = [completion](int status,
                              std::string_view bytes) { completion->Body(status, bytes); },
         .ended = [completion](int status,
                               const absl::Status& end) { completion->Ended(status, end); }});
  }

 private:
  const std::string target_;
  const int32_t vocab_;
  std::string model_;                         // as the server lists it, from GetLimits on
  const std::unique_ptr<HttpCaller> caller_;  // last: it ends the calls
};

}  // namespace

absl::StatusOr<std::unique_ptr<LoadTarget>> ConnectToOpenAi(const LoadServer& server) {
  TREADLE_ASSIGN_OR_RETURN(HttpUrl url, ParseHttpUrl(server.target));
  if (url.path.ends_with("/v1")) url.path.resize(url.path.size() - 3);
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<HttpCaller> caller,
                           HttpCaller::Open(url, server.access.tls, server.access.authorization));
  return std::make_unique<OpenAiTarget>(server, std::move(caller));
}

}  // namespace treadle
