// The fields of a body by tables, for every API whose requests become an OpenAiRequest. Errors are
// InvalidArgument and begin with the field's name. Pure functions; any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "server/openai/json/json_fields.h"
#include "server/openai/openai_request.h"

namespace treadle {

// The body's JSON object. NotFound: it is for another model.
absl::StatusOr<nlohmann::json> ReadBody(std::string_view body, const ServedModel& model);

// A field that is not taken: whether its value may be passed over.
absl::Status PassOver(const OpenAiField& field, const nlohmann::json& value);
absl::Status ReadSampling(const SamplingField& field, const nlohmann::json& value,
                          OpenAiRequest& to);

// How much a model shall think: variables of templates that let their users choose, the effort or a
// switch. `name`: of the field.
absl::Status ReadReasoningEffort(std::string_view name, const nlohmann::json& value,
                                 OpenAiRequest& to);

// Checks what holds between several fields, and what the tools of the request demand. `body`: the
// text that the request was read from, which has its schemas.
absl::Status ConcludeBody(std::string_view body, const ServedModel& model, OpenAiRequest& to);

// A field that is taken. `Request`: an OpenAiRequest, perhaps with more.
template <typename Request>
struct BodyField {
  std::string_view name;
  absl::Status (*read)(const nlohmann::json& value, Request& to);
};

// All fields of a body, which may also have those of kSamplingFields; others are refused.
template <typename Request>
absl::Status ReadFields(const nlohmann::json& object, std::span<const BodyField<Request>> taken,
                        std::span<const OpenAiField> others, Request& to) {
  const auto read = [&](const std::string& name, const nlohmann::json& value) -> absl::Status {
    for (const BodyField<Request>& field : taken) {
      if (field.name == name) return field.read(value, to);
    }
    for (const SamplingField& field : kSamplingFields) {
      if (field.name == name) return ReadSampling(field, value, to);
    }
    for (const OpenAiField& field : others) {
      if (field.name == name) return PassOver(field, value);
    }
    std::vector<std::string_view> known;
    for (const BodyField<Request>& field : taken) known.push_back(field.name);
    return Unsupported("", name, known);
  };
  for (const auto& [name, value] : object.items()) {
    if (!value.is_null()) TREADLE_RETURN_IF_ERROR(read(name, value));
  }
  return absl::OkStatus();
}

// The same, for a test of the document.
template <typename Request>
std::vector<OpenAiField> ListFields(std::span<const BodyField<Request>> taken,
                                    std::span<const OpenAiField> others) {
  constexpr auto kTaken = OpenAiField::Standing::kTaken;
  std::vector<OpenAiField> fields(others.begin(), others.end());
  for (const BodyField<Request>& field : taken) {
    fields.push_back({field.name, OpenAiIn::kChat, kTaken});
  }
  for (const SamplingField& field : kSamplingFields) {
    fields.push_back({field.name, OpenAiIn::kChat, kTaken});
  }
  return fields;
}

}  // namespace treadle
