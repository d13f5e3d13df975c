// Patterns and grammars, before a library sees them that cannot be interrupted.
//
// Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

// What counted repetitions in each other may multiply to: beyond, a single mask takes the library
// milliseconds, and soon minutes. a{m,n} counts as n (m + 1 if there is no n).
inline constexpr double kMaxRepetitions = 128;
// Of one constraint: character classes, each as often as it is repeated, and a sixteenth for every
// other character. A class of most characters takes milliseconds to compile.
inline constexpr double kMaxClasses = 512;
inline constexpr int kMaxPatternDepth = 32;  // of groups

// What a pattern is of. Of a JSON string, a character that stands there as an escape cannot be
// enforced, but for being left out of a class that has others.
enum class Text { kPlain, kJsonString };

// A regular expression of the whole text as ECMAScript's, in the part of it that can be enforced: ^
// and $ only at its ends, no \b, no look-around, no back references. "." becomes what it stands
// for. `classes`: of the constraint, before and after. InvalidArgument says what is wrong, and
// where, without naming the field.
absl::StatusOr<std::string> PreparePattern(std::string_view pattern, double& classes, Text text);

// Whether an EBNF grammar is within the same bounds. As rules may be in each other, so may their
// repetitions: those of all rules multiply.
absl::Status CheckGrammarText(std::string_view text);

}  // namespace treadle
