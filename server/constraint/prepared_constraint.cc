#include "server/constraint/prepared_constraint.h"

#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "base/utf8.h"
#include "server/constraint/json_schema.h"
#include "server/constraint/pattern.h"

namespace treadle {
namespace {

using Form = PreparedConstraint::Form;
using Json = nlohmann::ordered_json;  // properties come in the order in which they are written
using Kind = Constraint::Kind;

std::string EbnfLiteral(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      out += {'\\', 'u', '0', '0', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      if (c == '"' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + "\"";
}

// Whether the library can be given its texts at all.
absl::Status CheckTexts(const Constraint& constraint) {
  size_t bytes = 0;
  const auto check = [&bytes](std::string_view what, std::string_view text) -> absl::Status {
    bytes += text.size();
    if (text.find('\0') != std::string_view::npos) return InvalidArgument(what, "a null character");
    const size_t bad = FindInvalidUtf8(text);
    if (bad == std::string_view::npos) return absl::OkStatus();
    return InvalidArgument(what, "what is not valid UTF-8 at byte ", bad);
  };
  TREADLE_RETURN_IF_ERROR(check("has ", constraint.text));
  for (const std::string& choice : constraint.choices) {
    TREADLE_RETURN_IF_ERROR(check("has a choice with ", choice));
  }
  for (const Constraint::Tag& tag : constraint.tags) {
    for (const std::string* text : {&tag.begin, &tag.schema, &tag.end}) {
      TREADLE_RETURN_IF_ERROR(check(tag.field + " has ", *text));
    }
  }
  if (bytes <= kMaxConstraintBytes) return absl::OkStatus();
  return InvalidArgument("has ", bytes, " bytes, expected at most ", kMaxConstraintBytes);
}

absl::StatusOr<std::string> PrepareChoices(const std::vector<std::string>& choices) {
  if (choices.empty() || choices.size() > kMaxChoices) {
    return InvalidArgument("has ", choices.size(), " choices, expected 1 to ", kMaxChoices);
  }
  std::string text = "root ::= ";
  for (size_t i = 0; i < choices.size(); ++i) {
    text += (i == 0 ? "" : " | ") + EbnfLiteral(choices[i]);
  }
  return text;
}

// But for its tags.
absl::StatusOr<PreparedConstraint> PrepareRest(const Constraint& constraint) {
  const auto in = [&](Form form,
                      absl::StatusOr<std::string> text) -> absl::StatusOr<PreparedConstraint> {
    TREADLE_RETURN_IF_ERROR(text.status());
    return PreparedConstraint{form, *std::move(text),
                              form == Form::kSchema && constraint.any_whitespace};
  };
  double classes = 0;
  switch (constraint.kind) {
    case Kind::kJsonObject:
      return in(Form::kSchema, PrepareSchema(R"({"type":"object"})"));
    case Kind::kJsonSchema:
      return in(Form::kSchema, PrepareSchema(constraint.text));
    case Kind::kRegex:
      if (constraint.text.empty()) return InvalidArgument("is empty");
      return in(Form::kRegex, PreparePattern(constraint.text, classes, Text::kPlain));
    case Kind::kGrammar:
      TREADLE_RETURN_IF_ERROR(CheckGrammarText(constraint.text));
      return PreparedConstraint{Form::kGrammar, constraint.text};
    case Kind::kChoice:
      return in(Form::kGrammar, PrepareChoices(constraint.choices));
    case Kind::kTags:
      break;
  }
  return absl::InternalError("tags are no other constraint");
}

// As a part of a structural tag.
Json FormatOf(const PreparedConstraint& constraint) {
  switch (constraint.form) {
    case Form::kSchema: {
      Json format = {{"type", "json_schema"}, {"json_schema", Json::parse(constraint.text)}};
      if (!constraint.any_whitespace) format["max_whitespace_cnt"] = kMaxWhitespace;
      return format;
    }
    case Form::kRegex:
      return {{"type", "regex"}, {"pattern", constraint.text}};
    case Form::kGrammar:
    case Form::kStructuralTag:
      break;
  }
  return {{"type", "grammar"}, {"grammar", constraint.text}};
}

absl::StatusOr<Json> PrepareTags(const Constraint& constraint) {
  if (constraint.tags.size() > kMaxTags) {
    return InvalidArgument("has ", constraint.tags.size(), " schemas, expected at most ", kMaxTags);
  }
  Json tags = Json::array();
  for (const Constraint::Tag& tag : constraint.tags) {
    const auto schema = PrepareSchema(tag.schema);
    if (!schema.ok()) return InvalidArgument(tag.field, ": ", schema.status().message());
    tags.push_back({{"type", "tag"},
                    {"begin", tag.begin},
                    {"content", FormatOf({Form::kSchema, *schema, constraint.any_whitespace})},
                    {"end", tag.end}});
  }
  Json format = {{"tags", std::move(tags)}, {"stop_after_first", constraint.one_tag}};
  if (constraint.kind == Kind::kTags && !constraint.trigger.empty()) {
    format.update({{"type", "triggered_tags"}, {"triggers", Json::array({constraint.trigger})}});
  } else {
    format.update({{"type", "tags_with_separator"},
                   {"separator", constraint.separator},
                   {"at_least_one", true}});
  }
  return format;
}

// White space may follow what is thought.
Json BehindThought(const Constraint::Thought& thought, Json format) {
  const auto thinks = [&](const std::string& open) {
    const Json tag = {{"type", "tag"},
                      {"begin", open},
                      {"content", {{"type", "any_text"}}},
                      {"end", thought.close}};
    const Json space = {{"type", "regex"}, {"pattern", "[ \\n]{0,2}"}};
    return Json{{"type", "sequence"}, {"elements", {tag, space}}};
  };
  const Json before =
      thought.begun ? thinks("") : Json{{"type", "optional"}, {"content", thinks(thought.open)}};
  return {{"type", "sequence"}, {"elements", {before, std::move(format)}}};
}

}  // namespace

absl::StatusOr<PreparedConstraint> Prepare(const Constraint& constraint) {
  TREADLE_RETURN_IF_ERROR(CheckTexts(constraint));
  if (constraint.tags.empty() && !constraint.thought) return PrepareRest(constraint);
  Json format;
  if (!constraint.tags.empty()) {
    TREADLE_ASSIGN_OR_RETURN(format, PrepareTags(constraint));
  }
  if (constraint.kind != Kind::kTags) {
    TREADLE_ASSIGN_OR_RETURN(const PreparedConstraint rest, PrepareRest(constraint));
    format = constraint.tags.empty()
                 ? FormatOf(rest)
                 : Json{{"type", "or"}, {"elements", {FormatOf(rest), std::move(format)}}};
  }
  if (constraint.thought) format = BehindThought(*constraint.thought, std::move(format));
  const Json tag = {{"type", "structural_tag"}, {"format", std::move(format)}};
  return PreparedConstraint{Form::kStructuralTag, tag.dump()};
}

}  // namespace treadle
