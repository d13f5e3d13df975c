#include "server/openai/scoring_request.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/openai/body_fields.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

// The names of the two sides that are compared; a body has both of one row.
using Sides = std::pair<std::string_view, std::string_view>;
constexpr Sides kScored[] = {
    {"text_1", "text_2"}, {"data_1", "data_2"}, {"queries", "documents"}, {"queries", "items"}};
constexpr Sides kRanked[] = {{"query", "documents"}};
constexpr std::string_view kPassedOver[] = {
    "model", "mm_processor_kwargs", "request_id", "return_documents", "use_activation", "user"};

// One text, or an array of some.
absl::Status ReadTexts(std::string_view name, const Json& value, OpenAiRequest& to) {
  const Json texts = value.is_array() ? value : Json::array({value});
  if (texts.empty()) return Expected(name, value, "a string or an array of strings");
  if (texts.size() > kMaxInputs) {
    return InvalidArgument(name, " has ", texts.size(), " entries, expected at most ", kMaxInputs);
  }
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string where = value.is_array() ? Str(name, "[", i, "]") : std::string(name);
    TREADLE_ASSIGN_OR_RETURN(std::string text, ReadText(where, texts[i]));
    to.prompts.emplace_back(std::move(text));
  }
  return absl::OkStatus();
}

absl::Status ReadSides(const Json& object, const Sides& sides, ScoringQuestion& question,
                       OpenAiRequest& to) {
  const auto& [first, second] = sides;
  for (const std::string_view name : {first, second}) {
    const Json value = object.value(std::string(name), Json());
    if (value.is_null()) return InvalidArgument(name, " is missing");
    if (question.rank && name == first && !value.is_string()) {
      return Expected(name, value, "a string");
    }
    TREADLE_RETURN_IF_ERROR(ReadTexts(name, value, to));
    if (name == first) question.first = to.prompts.size();
  }
  const size_t others = to.prompts.size() - question.first;
  if (question.first == 1 || question.first == others) return absl::OkStatus();
  return InvalidArgument(first, " has ", question.first, " entries, expected 1, or as many as ",
                         second, " (", others, ")");
}

}  // namespace

absl::StatusOr<OpenAiRequest> ReadScoring(std::string_view body, const ServedModel& model,
                                          ScoringQuestion& question) {
  TREADLE_ASSIGN_OR_RETURN(const Json object, ReadBody(body, model));
  const std::span<const Sides> rows =
      question.rank ? std::span<const Sides>(kRanked) : std::span<const Sides>(kScored);
  const auto has = [&](std::string_view name) {
    return !object.value(std::string(name), Json()).is_null();
  };
  const auto found = std::ranges::find_if(
      rows, [&](const Sides& row) { return has(row.first) && has(row.second); });
  const Sides& sides = found == rows.end() ? rows.front() : *found;
  OpenAiRequest request{.common = {.embedding = true}};
  request.common.adapter = AdapterNamed(object, model);
  for (const auto& [name, value] : object.items()) {
    if (value.is_null() || name == sides.first || name == sides.second) continue;
    if (name == "truncate_prompt_tokens") {
      TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), request.common.truncate_prompt_tokens));
    } else if (name == "priority") {
      TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), request.common.priority));
    } else if (name == "top_n" && question.rank) {
      TREADLE_RETURN_IF_ERROR(Set(ReadInt(name, value), question.top_n));
      if (question.top_n < 0) return Expected(name, value, "0 for all, or more");
    } else if (std::ranges::find(kPassedOver, name) == std::end(kPassedOver)) {
      std::vector<std::string_view> known = {"truncate_prompt_tokens", "priority", "top_n"};
      for (const Sides& row : rows) known.insert(known.end(), {row.first, row.second});
      return Unsupported("", name, known);
    }
  }
  TREADLE_RETURN_IF_ERROR(ReadSides(object, sides, question, request));
  return request;
}

}  // namespace treadle
