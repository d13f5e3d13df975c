// What a client says its answer must look like.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace treadle {

struct Constraint {
  enum class Kind : uint8_t {
    kJsonObject,  // any JSON object
    kJsonSchema,  // text: the schema
    kRegex,       // text: of the whole answer, as ECMAScript's
    kChoice,      // one of choices
    kGrammar,     // text: EBNF whose rules are "name ::= ...", from the rule `root`
    kTags,        // tags, and text between them if there is a trigger
  };
  // JSON of a schema between two literal texts.
  struct Tag {
    std::string begin;
    std::string schema;
    std::string end;
    std::string field;  // what the client calls the schema
  };
  // Free text between two marks, before all else.
  struct Thought {
    std::string open;
    std::string close;
    bool begun = false;  // its mark stands before the answer; else the answer may have it, or not
  };
  Kind kind = Kind::kJsonObject;
  std::string text = {};
  std::vector<std::string> choices = {};
  // Tags that kTags allows; with another kind the answer may be tags instead.
  std::vector<Tag> tags = {};
  std::string separator = {};  // of tags that are all there is, at least one
  std::string trigger = {};    // begins every tag; text that does is one. Empty: no text
  bool one_tag = false;        // ends the answer
  std::optional<Thought> thought = {};
  // Of JSON: any white space between its parts; else at most one character in each place, since
  // small models that may write line ends write them for ever.
  bool any_whitespace = false;
  std::string field = "constraint";  // what the client calls it, for errors
};

inline constexpr size_t kMaxConstraintBytes = 64 << 10;
inline constexpr size_t kMaxChoices = 1024;
inline constexpr size_t kMaxTags = 128;

}  // namespace treadle
