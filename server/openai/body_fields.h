// The fields of a body by tables, for every API whose requests become an OpenAiRequest. Errors are
// InvalidArgument and begin with the field's name. Pure functions; any thread.
#pragma once

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "base/status.h"
#include "server/openai/json/json_fields.h"
#include "server/openai/openai_request.h"

namespace treadle {

// The body's JSON object. NotFound: it is for another model.
absl::StatusOr<nlohmann::json> ReadBody(std::string_view body, const ServedModel& model);
// The adapter that such a body names as its model; empty: none.
std::string AdapterNamed(const nlohmann::json& object, const ServedModel& model);

// A field that is not taken: whether its value may be passed over.
absl::Status PassOver(const OpenAiField& field, const nlohmann::json& value);
absl::Status ReadSampling(const SamplingField& field, const nlohmann::json& value,
                          OpenAiRequest& to);

// How much a model shall think: variables of templates that let their users choose, the effort or a
// switch. `name`: of the field.
absl::Status ReadReasoningEffort(const std::string& name, const nlohmann::json& value,
                                 OpenAiRequest& to);

// Checks what holds between several fields, and what the tools of the request demand. `body`: the
// text that the request was read from, which has its schemas.
absl::Status ConcludeBody(std::string_view body, const ServedModel& model, OpenAiRequest& to);

// A field that is taken. `Request`: an OpenAiRequest, perhaps with more.
template <typename Request>
struct BodyField {
  std::string_view name;
  absl::Status (*read)(const std::string& name, const nlohmann::json& value, Request& to);
  OpenAiIn in = OpenAiIn::kBoth;
};

// BodyField::read that sets a member: Sets<ReadBool, &OpenAiRequest::common, &...> that of a
// member.
template <auto Read, auto... member, typename Request>
absl::Status Sets(const std::string& name, const nlohmann::json& value, Request& to) {
  return Set(Read(name, value), (to.*....*member));
}
// BodyField::read of `model`, which ReadBody has read, and of what has no effect.
template <typename Request>
absl::Status IsRead(const std::string& /*name*/, const nlohmann::json& /*value*/, Request& /*to*/) {
  return absl::OkStatus();
}

inline bool IsIn(OpenAiIn in, bool chat) {
  const OpenAiIn wanted = chat ? OpenAiIn::kChat : OpenAiIn::kCompletions;
  return (static_cast<int>(in) & static_cast<int>(wanted)) != 0;
}

// One of all fields of a body, which may also have those of kSamplingFields unless it is for
// embeddings; others are refused.
template <typename Request>
absl::Status ReadField(const std::string& name, const nlohmann::json& value,
                       std::span<const BodyField<Request>> taken,
                       std::span<const OpenAiField> others, Request& to) {
  const auto is = [&](const auto& field) { return field.name == name && IsIn(field.in, to.chat); };
  if (const auto found = std::ranges::find_if(taken, is); found != taken.end()) {
    return found->read(name, value, to);
  }
  std::vector<std::string_view> known;
  for (const SamplingField& field : kSamplingFields) {
    if (to.common.embedding) break;
    if (field.name == name) return ReadSampling(field, value, to);
    known.push_back(field.name);
  }
  if (const auto found = std::ranges::find_if(others, is); found != others.end()) {
    return PassOver(*found, value);
  }
  for (const BodyField<Request>& field : taken) {
    if (IsIn(field.in, to.chat)) known.push_back(field.name);
  }
  return Unsupported("", name, known);
}
template <typename Request>
absl::Status ReadFields(const nlohmann::json& object, std::span<const BodyField<Request>> taken,
                        std::span<const OpenAiField> others, Request& to) {
  for (const auto& [name, value] : object.items()) {
    if (!value.is_null()) TREADLE_RETURN_IF_ERROR(ReadField(name, value, taken, others, to));
  }
  return absl::OkStatus();
}

// The same, for a test of the document.
template <typename Request>
std::vector<OpenAiField> ListFields(std::span<const BodyField<Request>> taken,
                                    std::span<const OpenAiField> others) {
  constexpr auto kTaken = OpenAiField::Standing::kTaken;
  std::vector<OpenAiField> fields(others.begin(), others.end());
  for (const BodyField<Request>& field : taken) fields.push_back({field.name, field.in, kTaken});
  for (const SamplingField& field : kSamplingFields) {
    fields.push_back({field.name, OpenAiIn::kBoth, kTaken});
  }
  return fields;
}

}  // namespace treadle
