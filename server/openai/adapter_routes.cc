#include "server/openai/adapter_routes.h"

#include <ctime>
#include <utility>

#include "base/json_file.h"
#include "base/quoted.h"
#include "base/status.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_errors.h"
#include "server/session/sampling_defaults.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kModels = "/v1/models";

// The entries of a list of models, all of them or the one of that name.
class ModelList {
 public:
  explicit ModelList(const ServedModel& model)
      : model_(model),
        names_(model.names.empty() ? std::vector{model.name} : model.names),
        rest_(Str(R"(,"object":"model","created":)", std::time(nullptr),
                  R"(,"owned_by":"treadle","max_model_len":)", model.max_context,
                  R"(,"vocab_size":)", model.vocab, R"(,"has_chat_template":)",
                  model.chat_template ? "true" : "false", R"(,"sampling_defaults":)",
                  model.sampling_defaults ? EffectsJson(*model.sampling_defaults) : "null")) {}

  std::string All() const {
    std::string entries;
    const auto add = [&](const std::string& entry) {
      entries += (entries.empty() ? "" : ",") + entry;
    };
    for (const std::string& name : names_) add(Entry(name, ""));
    if (model_.adapters) {
      for (const AdapterRegistry::Named& adapter : model_.adapters->List()) {
        if (!model_.IsCalled(adapter.name)) add(Entry(adapter.name, model_.name));
      }
    }
    return R"({"object":"list","data":[)" + entries + "]}";
  }
  absl::StatusOr<std::string> One(const std::string& name) const {
    if (model_.IsCalled(name)) return Entry(name, "");
    if (model_.IsAdapter(name)) return Entry(name, model_.name);
    return NotFound("the model ", JsonString(name), " does not exist");
  }

 private:
  // parent: of an adapter; empty: the model itself.
  std::string Entry(const std::string& name, const std::string& parent) const {
    return Str(R"({"id":)", JsonString(name), rest_,
               parent.empty() ? "" : R"(,"parent":)" + JsonString(parent), "}");
  }

  const ServedModel& model_;
  const std::vector<std::string> names_;
  const std::string rest_;
};

// A text of a call's body.
absl::StatusOr<std::string> TextOf(const Json& object, const char* name) {
  const Json text = object.value(name, Json());
  if (!text.is_string()) return InvalidArgument(name, " is ", text.dump(), ", expected a string");
  return text.get<std::string>();
}

absl::StatusOr<std::string> LoadOrUnload(const ServedModel& model, bool load,
                                         std::string_view body) {
  if (!model.adapters) return Unimplemented("this server takes no adapters");
  TREADLE_ASSIGN_OR_RETURN(const Json object, ParseJsonObject(body, "the body"));
  TREADLE_ASSIGN_OR_RETURN(const std::string name, TextOf(object, "lora_name"));
  if (!load) {
    TREADLE_RETURN_IF_ERROR(model.adapters->Remove(name));
    return "Success: LoRA adapter '" + name + "' removed successfully.";
  }
  TREADLE_ASSIGN_OR_RETURN(const std::string path, TextOf(object, "lora_path"));
  TREADLE_RETURN_IF_ERROR(model.adapters->Add(name, path));
  return "Success: LoRA adapter '" + name + "' added successfully.";
}

// Answers on a thread of the work pool: files are read and checked.
HttpRoute Change(const std::string& path, SessionEnvironment& sessions, bool load) {
  return {"POST", path, [&sessions, load](HttpRequest given, std::shared_ptr<HttpReply> reply) {
            const auto request = std::make_shared<const HttpRequest>(std::move(given));
            const std::string_view key = request->Header("authorization");
            absl::Status status = sessions.refusals->Add(sessions.CheckOperator(key));
            if (status.ok()) {
              status = sessions.Submit(
                  key, {.client = request->peer}, request->body.size(),
                  [request, reply, &model = sessions.model, load, counts = sessions.refusals] {
                    const auto answer = LoadOrUnload(model, load, request->body);
                    counts->Add(answer.status()).IgnoreError();
                    reply->Send(answer.ok()
                                    ? HttpResponse{.content_type = "text/plain", .body = *answer}
                                    : OpenAiError(answer.status()));
                  });
            }
            if (!status.ok()) reply->Send(OpenAiError(status));
          }};
}

}  // namespace

std::vector<HttpRoute> ModelRoutes(SessionEnvironment& sessions) {
  const auto list = std::make_shared<const ModelList>(sessions.model);
  const auto answer = [&sessions, list](const HttpRequest& request, const auto& reply) {
    const absl::Status caller = sessions.Authorize(request.Header("authorization")).status();
    const std::string path(request.path);
    const absl::StatusOr<std::string> body = !caller.ok() ? absl::StatusOr<std::string>(caller)
                                             : path.size() <= kModels.size() + 1
                                                 ? list->All()
                                                 : list->One(path.substr(kModels.size() + 1));
    reply->Send(body.ok() ? HttpResponse{.content_type = "application/json", .body = *body}
                          : OpenAiError(body.status()));
  };
  return {{"GET", std::string(kModels), answer},
          {"GET", std::string(kModels) + "/", answer},
          Change("/v1/load_lora_adapter", sessions, true),
          Change("/v1/unload_lora_adapter", sessions, false)};
}

}  // namespace treadle
