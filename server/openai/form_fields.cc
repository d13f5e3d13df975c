#include "server/openai/form_fields.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/utf8.h"
#include "server/openai/json/json_fields.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
using Kind = Constraint::Kind;

absl::Status Begin(std::string_view field, Kind kind, AskedForm& to) {
  if (to.constraint) {
    return InvalidArgument(field, " is given, expected not together with ", to.constraint->field);
  }
  to.constraint = Constraint{.kind = kind, .field = std::string(field)};
  return absl::OkStatus();
}

// `kind`: in vLLM's words; `path`: where `value`, called `name`, stands in the body.
absl::Status ReadForm(std::string_view field, const std::string& name, std::string_view kind,
                      const Json& value, std::vector<std::string_view> path, AskedForm& to) {
  constexpr std::pair<std::string_view, Kind> kKinds[] = {{"json", Kind::kJsonSchema},
                                                          {"json_object", Kind::kJsonObject},
                                                          {"regex", Kind::kRegex},
                                                          {"choice", Kind::kChoice},
                                                          {"grammar", Kind::kGrammar}};
  const auto* const row =
      std::ranges::find(kKinds, kind, &std::pair<std::string_view, Kind>::first);
  if (row == std::end(kKinds)) {
    std::vector<std::string_view> known = {"disable_any_whitespace"};
    for (const auto& [word, of] : kKinds) known.push_back(word);
    return Unsupported(Str(field, "."), kind, known);
  }
  TREADLE_RETURN_IF_ERROR(Begin(field, row->second, to));
  if (row->second == Kind::kJsonObject) return ReadBool(name, value).status();
  if (row->second == Kind::kJsonSchema && value.is_object()) {
    to.schema_path = std::move(path);
    return absl::OkStatus();
  }
  if (row->second != Kind::kChoice) return Set(ReadText(name, value), to.constraint->text);
  if (!value.is_array()) return Expected(name, value, "an array of strings");
  for (const Json& choice : value) {
    TREADLE_RETURN_IF_ERROR(Set(ReadText(name, choice), to.constraint->choices.emplace_back()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadResponseFormat(std::string_view field, const Json& value, AskedForm& to) {
  if (!value.is_object()) return Expected(field, value, "an object");
  const Json type = value.value("type", Json());
  const bool object = type == "json_object", schema = type == "json_schema";
  const std::string_view member = object ? "schema" : schema ? "json_schema" : "";
  for (const auto& [key, part] : value.items()) {
    if (key == "type" || key == member || part.is_null()) continue;
    return Unsupported("response_format.", key, {{"type", member}});
  }
  if (type == "text") return absl::OkStatus();
  if (!object && !schema) {
    return Expected("response_format.type", type, "\"text\", \"json_object\" or \"json_schema\"");
  }
  const Json described = value.value(member, Json());
  if (object && described.is_null()) return Begin(field, Kind::kJsonObject, to);
  TREADLE_RETURN_IF_ERROR(Begin(field, Kind::kJsonSchema, to));
  to.schema_path = {field, member};
  if (object) {
    return described.is_object() ? absl::OkStatus()
                                 : Expected("response_format.schema", described, "an object");
  }
  to.schema_path.emplace_back("schema");
  if (!described.is_object() || !described.contains("schema")) {
    return Expected("response_format.json_schema", described, "an object with a schema");
  }
  for (const auto& [key, part] : described.items()) {
    // Every schema is enforced, strict or not.
    constexpr std::string_view kKnown[] = {"schema", "name", "strict", "description"};
    if (std::ranges::count(kKnown, key) > 0) continue;
    return Unsupported("response_format.json_schema.", key, kKnown);
  }
  return absl::OkStatus();
}

absl::Status ReadStructuredOutputs(std::string_view field, const Json& value, AskedForm& to) {
  if (!value.is_object()) return Expected(field, value, "an object");
  for (const auto& [key, part] : value.items()) {
    if (key == "disable_any_whitespace" && !part.is_null()) {
      TREADLE_ASSIGN_OR_RETURN(const bool disabled, ReadBool(Str(field, ".", key), part));
      to.any_whitespace = !disabled;
      continue;
    }
    if (part.is_null() || part == false) continue;
    TREADLE_RETURN_IF_ERROR(ReadForm(field, Str(field, ".", Cut(Printable(key), kShown)), key, part,
                                     {field, "json"}, to));
  }
  return absl::OkStatus();
}

absl::Status ReadGuided(std::string_view field, const Json& value, AskedForm& to) {
  return ReadForm(field, std::string(field), field.substr(field.find('_') + 1), value, {field}, to);
}

}  // namespace treadle
