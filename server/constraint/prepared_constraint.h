// Constraints in the form that XGrammar takes, within the bounds of json_schema.h and pattern.h.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/constraint/constraint.h"

namespace treadle {

// White-space characters that JSON may have in one place, unless any number is allowed.
inline constexpr int kMaxWhitespace = 1;

struct PreparedConstraint {
  enum class Form : uint8_t { kSchema, kRegex, kGrammar, kStructuralTag };
  Form form;
  std::string text;
  bool any_whitespace = false;  // of kSchema

  auto operator<=>(const PreparedConstraint&) const = default;
};

// InvalidArgument says what is wrong, or that it cannot be enforced. Pure function; any thread.
absl::StatusOr<PreparedConstraint> Prepare(const Constraint& constraint);

}  // namespace treadle
