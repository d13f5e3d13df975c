// The fields that say what an answer must look like: OpenAI's response_format (with llama.cpp's
// `schema` beside json_object), vLLM's structured_outputs, and its older guided_json and the like.
// At most one form may be asked for. Errors are InvalidArgument and begin with the field's name.
//
// Pure functions; any thread.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/constraint/constraint.h"

namespace treadle {

struct AskedForm {
  std::optional<Constraint> constraint = {};
  // Where the constraint's schema stands in the body, whose text is taken: members of parsed
  // objects lose their order.
  std::vector<std::string_view> schema_path = {};
  bool any_whitespace = false;  // of JSON, whatever asks for it
};

// Here and below `field`, its name in the body, lives on.
absl::Status ReadResponseFormat(std::string_view field, const nlohmann::json& value, AskedForm& to);
// At most one of json, json_object, regex, choice and grammar; and disable_any_whitespace, which
// is true unless it says false.
absl::Status ReadStructuredOutputs(std::string_view field, const nlohmann::json& value,
                                   AskedForm& to);
// `field`: guided_json, guided_regex, guided_choice or guided_grammar.
absl::Status ReadGuided(std::string_view field, const nlohmann::json& value, AskedForm& to);

}  // namespace treadle
