// JSON schemas (draft 2020-12) as far as every answer is sure to satisfy them.
//
// A keyword is enforced or refused by its name and place; none is ignored. The enforced ones are
// the table in json_schema.cc; beyond it:
// - an object without additionalProperties has the properties that are named, in their order; an
//   array without items may have any;
// - const and enum stand alone, but for a type that they have; so do anyOf, oneOf (of alternatives
//   that exclude each other for sure), allOf (of one) and $ref (within the schema);
// - properties and items without a type mean an object, an array;
// - date, time and the like are enforced in form alone.
//
// Pure function; any thread.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

inline constexpr int kMaxSchemaNodes = 4096;  // schemas in it, references not followed

// The schema as the library is to see it. InvalidArgument names what is not JSON, or cannot be
// enforced, and where ("/properties/a").
absl::StatusOr<std::string> PrepareSchema(std::string_view text);

}  // namespace treadle
