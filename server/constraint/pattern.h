// Patterns and grammars, before a library sees them that cannot be interrupted.
//
// Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace treadle {

// Largest product of counted repetitions in each other. Beyond it a single mask takes the library
// milliseconds, and soon minutes. a{m,n} counts as n (m + 1 if there is no n).
inline constexpr double kMaxRepetitions = 128;
// Most character classes of one constraint, each counted as often as it is repeated; every other
// character counts as a sixteenth. A class of most characters takes milliseconds to compile.
inline constexpr double kMaxClasses = 512;
inline constexpr int kMaxPatternDepth = 32;  // of groups

// The text that a pattern describes. In a JSON string, a character that is written as an escape
// cannot be enforced; it can only be left out of a class that has others.
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
