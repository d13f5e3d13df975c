// What a client says its answer must look like.
#pragma once

#include <cstddef>
#include <cstdint>
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
  };
  Kind kind = Kind::kJsonObject;
  std::string text = {};
  std::vector<std::string> choices = {};
  std::string field = "constraint";  // what the client calls it, for errors
};

inline constexpr size_t kMaxConstraintBytes = 64 << 10;
inline constexpr size_t kMaxChoices = 1024;

}  // namespace treadle
