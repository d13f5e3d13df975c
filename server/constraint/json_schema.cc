#include "server/constraint/json_schema.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "base/json_file.h"
#include "base/quoted.h"
#include "base/status.h"
#include "base/utf8.h"
#include "server/constraint/pattern.h"

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;  // properties come in the order in which they are written

constexpr size_t kShown = 60;
constexpr int64_t kMaxItems = 10'000;
constexpr auto kMaxLength = static_cast<int64_t>(kMaxRepetitions);  // of a string with lengths
constexpr int64_t kMaxMultiple = 256;

// Types that a keyword belongs to; a schema of none of them, but kAny, does not have it.
enum Types : uint8_t {
  kNumber = 1,
  kInteger = 2,
  kString = 4,
  kArray = 8,
  kObject = 16,
  kAny = 32
};

struct Keyword {
  std::string_view name;
  uint8_t types;
};
constexpr uint8_t kNumbers = kNumber | kInteger;
constexpr Keyword kEnforced[] = {
    {"additionalProperties", kObject},
    {"exclusiveMaximum", kNumbers},
    {"exclusiveMinimum", kNumbers},
    {"format", kString},
    {"items", kArray},
    {"maxItems", kArray},
    {"maxLength", kString},
    {"maxProperties", kObject},
    {"maximum", kNumbers},
    {"minItems", kArray},
    {"minLength", kString},
    {"minProperties", kObject},
    {"minimum", kNumbers},
    {"multipleOf", kInteger},
    {"pattern", kString},
    {"prefixItems", kArray},
    {"properties", kObject},
    {"required", kObject},
    {"type", kAny},
    {"uniqueItems", kArray},  // false
};
// One of them is all that a schema says.
constexpr std::string_view kAlone[] = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"};
constexpr std::string_view kAnnotations[] = {"$comment",    "$defs",      "$schema",     "default",
                                             "definitions", "deprecated", "description", "examples",
                                             "readOnly",    "title",      "writeOnly"};
constexpr std::string_view kFormats[] = {"date",          "date-time", "duration", "email",
                                         "hostname",      "ipv4",      "time",     "uri",
                                         "uri-reference", "uuid"};
// The library's own has quoted names, in which not every escape is one of JSON's.
constexpr std::string_view kEmail =
    "^[A-Za-z0-9_%+-]+(\\.[A-Za-z0-9_%+-]+)*@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
    "(\\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)+$";

bool Contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

uint8_t TypeBit(std::string_view type) {
  if (type == "number") return kNumber;
  if (type == "integer") return kInteger;
  if (type == "string") return kString;
  if (type == "array") return kArray;
  if (type == "object") return kObject;
  return type == "boolean" || type == "null" ? kAny : 0;
}

bool HasType(const Json& value, std::string_view type) {
  if (type == "integer") {
    return value.is_number_integer() ||
           (value.is_number() && value.get<double>() == std::floor(value.get<double>()));
  }
  if (type == "number") return value.is_number();
  if (type == "string") return value.is_string();
  if (type == "array") return value.is_array();
  if (type == "object") return value.is_object();
  return type == "boolean" ? value.is_boolean() : value.is_null();
}

class Preparation {
 public:
  explicit Preparation(Json root) : root_(std::move(root)) {}

  absl::StatusOr<std::string> Run() {
    TREADLE_RETURN_IF_ERROR(Visit(root_, ""));
    for (const auto& [place, to] : references_) {
      if (visited_.contains(to)) continue;
      return Refused(place, "$ref",
                     Str("leads to ", Quoted("#" + to), ", which is no schema in it"));
    }
    return root_.dump();
  }

 private:
  absl::Status Refused(const std::string& place, std::string_view keyword,
                       const std::string& why) const {
    return InvalidArgument("the keyword ", keyword, " at '", Cut(Printable(place), kShown), "/' ",
                           why);
  }
  absl::Status NotEnforced(const std::string& place, std::string_view keyword) const {
    return Refused(place, Cut(Printable(keyword), kShown), "cannot be enforced");
  }

  absl::Status Visit(Json& schema, const std::string& place);
  absl::Status VisitEach(Json& schemas, const std::string& place);
  absl::Status VisitAlone(Json& schema, std::string_view alone, const std::string& place);
  absl::Status VisitValues(const Json& schema, std::string_view alone, const std::string& place);
  absl::Status VisitTyped(Json& schema, const std::string& place);
  absl::StatusOr<uint8_t> TypesOf(Json& schema, const std::string& place);
  absl::Status CheckNumber(const Json& schema, const std::string& place);
  absl::Status PrepareString(Json& schema, const std::string& place);
  absl::Status SetPattern(Json& schema, const std::string& pattern, std::string_view keyword,
                          const std::string& place);
  absl::Status PrepareArray(Json& schema, const std::string& place);
  absl::Status PrepareObject(Json& schema, const std::string& place);
  // Absent: `otherwise`.
  absl::StatusOr<int64_t> Count(const Json& schema, const char* keyword, int64_t most,
                                int64_t otherwise, const std::string& place);

  Json root_;
  int nodes_ = 0;
  double classes_ = 0;                                           // of all patterns
  std::set<std::string> visited_;                                // pointers
  std::vector<std::pair<std::string, std::string>> references_;  // from, to
};

absl::Status Preparation::Visit(Json& schema, const std::string& place) {
  if (++nodes_ > kMaxSchemaNodes) {
    return InvalidArgument("has more than ", kMaxSchemaNodes, " schemas in it");
  }
  visited_.insert(place);
  if (schema.is_boolean()) return absl::OkStatus();
  if (!schema.is_object()) {
    return InvalidArgument("the schema at '", Cut(Printable(place), kShown), "/' is ",
                           Cut(schema.dump(), kShown), ", expected an object or a boolean");
  }
  for (const char* definitions : {"$defs", "definitions"}) {
    if (!schema.contains(definitions)) continue;
    TREADLE_RETURN_IF_ERROR(VisitEach(schema[definitions], place + "/" + definitions));
  }
  for (const std::string_view alone : kAlone) {
    if (schema.contains(alone)) return VisitAlone(schema, alone, place);
  }
  return VisitTyped(schema, place);
}

absl::Status Preparation::VisitEach(Json& schemas, const std::string& place) {
  if (!schemas.is_object() && !schemas.is_array()) {
    return InvalidArgument("'", Cut(Printable(place), kShown), "' is ", Cut(schemas.dump(), kShown),
                           ", expected schemas");
  }
  for (auto item = schemas.begin(); item != schemas.end(); ++item) {
    const std::string name =
        schemas.is_object() ? item.key() : std::to_string(item - schemas.begin());
    TREADLE_RETURN_IF_ERROR(Visit(*item, place + "/" + name));
  }
  return absl::OkStatus();
}

absl::Status Preparation::VisitAlone(Json& schema, std::string_view alone,
                                     const std::string& place) {
  const bool values = alone == "const" || alone == "enum";
  for (const auto& [name, value] : schema.items()) {
    if (name == alone || Contains(kAnnotations, name) || (values && name == "type")) continue;
    return Refused(place, name, Str("cannot be enforced beside ", alone));
  }
  Json& value = schema[std::string(alone)];
  if (values) {
    TREADLE_RETURN_IF_ERROR(VisitValues(schema, alone, place));
    schema.erase("type");
    return absl::OkStatus();
  }
  if (alone != "$ref") {
    if (!value.is_array() || value.empty() || (alone == "allOf" && value.size() > 1)) {
      return Refused(place, alone,
                     alone == "allOf" ? "cannot be enforced unless it has exactly one schema"
                                      : "is no array of schemas");
    }
    return VisitEach(value, Str(place, "/", alone));
  }
  const std::string to = value.is_string() ? value.get<std::string>() : "";
  if ((to != "#" && !to.starts_with("#/")) || to.find_first_of("~%") != to.npos) {
    return Refused(place, alone, "cannot be enforced, expected # or #/PATH without escapes");
  }
  references_.emplace_back(place, to.substr(1));
  return absl::OkStatus();
}

// const and enum, and a type beside them.
absl::Status Preparation::VisitValues(const Json& schema, std::string_view alone,
                                      const std::string& place) {
  const Json value = schema[std::string(alone)];
  if (alone == "enum" && (!value.is_array() || value.empty())) {
    return Refused(place, alone, "is no array of values");
  }
  if (!schema.contains("type")) return absl::OkStatus();
  const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
  for (const Json& each : alone == "enum" ? value : Json::array({value})) {
    const bool fits = std::ranges::any_of(types, [&](const Json& type) {
      return type.is_string() && TypeBit(type.get<std::string>()) != 0 &&
             HasType(each, type.get<std::string>());
    });
    if (fits) continue;
    return Refused(place, "type",
                   Str("does not have ", Cut(each.dump(), kShown), ", which ", alone, " names"));
  }
  return absl::OkStatus();
}

// The bits of `type`, which is added if other keywords say it.
absl::StatusOr<uint8_t> Preparation::TypesOf(Json& schema, const std::string& place) {
  if (!schema.contains("type")) {
    const bool object = schema.contains("properties") || schema.contains("additionalProperties");
    const bool array = schema.contains("items") || schema.contains("prefixItems");
    if (object != array) schema["type"] = object ? "object" : "array";
    return object == array ? kAny : object ? kObject : kArray;
  }
  const Json types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
  uint8_t bits = 0;
  for (const Json& type : types) {
    const uint8_t bit = type.is_string() ? TypeBit(type.get<std::string>()) : 0;
    if (bit == 0) return Refused(place, "type", Str("is ", Cut(type.dump(), kShown)));
    bits |= bit;
  }
  if (bits == 0) return Refused(place, "type", "is empty");
  return bits;
}

absl::Status Preparation::VisitTyped(Json& schema, const std::string& place) {
  TREADLE_ASSIGN_OR_RETURN(const uint8_t types, TypesOf(schema, place));
  for (const auto& [name, value] : schema.items()) {
    if (Contains(kAnnotations, name)) continue;
    const auto* const keyword = std::ranges::find(kEnforced, name, &Keyword::name);
    if (keyword == std::end(kEnforced)) return NotEnforced(place, name);
    if (keyword->types != kAny && (keyword->types & types) == 0) {
      return Refused(place, name, "cannot be enforced without a type that it belongs to");
    }
  }
  if ((types & kNumbers) != 0) TREADLE_RETURN_IF_ERROR(CheckNumber(schema, place));
  if ((types & kString) != 0) TREADLE_RETURN_IF_ERROR(PrepareString(schema, place));
  if ((types & kArray) != 0) TREADLE_RETURN_IF_ERROR(PrepareArray(schema, place));
  if ((types & kObject) != 0) TREADLE_RETURN_IF_ERROR(PrepareObject(schema, place));
  return absl::OkStatus();
}

absl::Status Preparation::CheckNumber(const Json& schema, const std::string& place) {
  for (const char* bound : {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}) {
    if (!schema.contains(bound)) continue;
    const Json& value = schema[bound];
    if (!value.is_number() || std::abs(value.get<double>()) > 1e15) {
      return Refused(
          place, bound,
          Str("is ", Cut(value.dump(), kShown), ", expected a number from -1e15 to 1e15"));
    }
    if (schema.contains("multipleOf"))
      return Refused(place, bound, "cannot be enforced beside multipleOf");
  }
  if (!schema.contains("multipleOf")) return absl::OkStatus();
  if (schema["type"] != "integer" || !IntegerIn(schema["multipleOf"], 1, kMaxMultiple)) {
    return Refused(place, "multipleOf",
                   Str("cannot be enforced, but for integers and from 1 to ", kMaxMultiple));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Preparation::Count(const Json& schema, const char* keyword, int64_t most,
                                           int64_t otherwise, const std::string& place) {
  if (!schema.contains(keyword)) return otherwise;
  const Json& value = schema[keyword];
  if (const auto count = IntegerIn(value, 0, most)) return *count;
  return Refused(
      place, keyword,
      Str("is ", Cut(value.dump(), kShown), ", expected a whole number from 0 to ", most));
}

// Lengths become a pattern: of the library's own strings, those of a length may have characters
// that JSON does not allow unescaped.
absl::Status Preparation::PrepareString(Json& schema, const std::string& place) {
  TREADLE_ASSIGN_OR_RETURN(const int64_t least,
                           Count(schema, "minLength", kMaxLength - 1, 0, place));
  TREADLE_ASSIGN_OR_RETURN(const int64_t most, Count(schema, "maxLength", kMaxLength, -1, place));
  const bool lengths = schema.contains("minLength") || schema.contains("maxLength");
  if (lengths + schema.contains("pattern") + schema.contains("format") > 1) {
    return Refused(place, schema.contains("pattern") ? "pattern" : "format",
                   "cannot be enforced beside another of pattern, format and lengths");
  }
  if (lengths) {
    schema.erase("minLength");
    schema.erase("maxLength");
    if (most >= 0 && most < least) return Refused(place, "maxLength", "is less than minLength");
    return SetPattern(
        schema, Str("^[^\\x00-\\x1f]{", least, ",", most < 0 ? "" : std::to_string(most), "}$"),
        "maxLength", place);
  }
  if (schema.contains("pattern")) {
    if (!schema["pattern"].is_string()) return Refused(place, "pattern", "is no string");
    return SetPattern(schema, schema["pattern"].get<std::string>(), "pattern", place);
  }
  if (schema.contains("format")) {
    const Json& format = schema["format"];
    if (!format.is_string() || !Contains(kFormats, format.get<std::string>())) {
      return Refused(place, "format",
                     Str("is ", Cut(format.dump(), kShown), ", which cannot be enforced"));
    }
    if (format == "email") {
      schema.erase("format");
      return SetPattern(schema, std::string(kEmail), "format", place);
    }
  }
  return absl::OkStatus();
}

absl::Status Preparation::SetPattern(Json& schema, const std::string& pattern,
                                     std::string_view keyword, const std::string& place) {
  auto prepared = PreparePattern(pattern, classes_, Text::kJsonString);
  if (!prepared.ok()) return Refused(place, keyword, std::string(prepared.status().message()));
  schema["pattern"] = *std::move(prepared);
  return absl::OkStatus();
}

absl::Status Preparation::PrepareArray(Json& schema, const std::string& place) {
  if (schema.contains("uniqueItems")) {
    if (schema["uniqueItems"] != false) return NotEnforced(place, "uniqueItems");
    schema.erase("uniqueItems");
  }
  for (const char* count : {"minItems", "maxItems"}) {
    TREADLE_RETURN_IF_ERROR(Count(schema, count, kMaxItems, 0, place).status());
  }
  if (!schema.contains("items") && !schema.contains("prefixItems"))
    schema["items"] = Json::object();
  if (schema.contains("prefixItems")) {
    if (!schema["prefixItems"].is_array()) return Refused(place, "prefixItems", "is no array");
    for (Json& item : schema["prefixItems"]) {
      if (item == true) item = Json::object();  // the library knows no other
    }
    TREADLE_RETURN_IF_ERROR(VisitEach(schema["prefixItems"], place + "/prefixItems"));
  }
  return schema.contains("items") ? Visit(schema["items"], place + "/items") : absl::OkStatus();
}

absl::Status Preparation::PrepareObject(Json& schema, const std::string& place) {
  const bool others =
      schema.contains("additionalProperties") && schema["additionalProperties"] != false;
  TREADLE_ASSIGN_OR_RETURN(const int64_t least,
                           Count(schema, "minProperties", kMaxItems, 0, place));
  TREADLE_RETURN_IF_ERROR(Count(schema, "maxProperties", kMaxItems, 0, place).status());
  const bool any = !schema.contains("properties") && !schema.contains("additionalProperties");
  if (any) schema["additionalProperties"] = true;
  if (least > 1 && (others || any)) {
    // They may have the same name.
    return Refused(place, "minProperties", "cannot be enforced of properties without a name");
  }
  if (schema.contains("properties")) {
    if (!schema["properties"].is_object()) return Refused(place, "properties", "is no object");
    TREADLE_RETURN_IF_ERROR(VisitEach(schema["properties"], place + "/properties"));
  }
  if (schema.contains("additionalProperties")) {
    TREADLE_RETURN_IF_ERROR(Visit(schema["additionalProperties"], place + "/additionalProperties"));
  }
  if (!schema.contains("required")) return absl::OkStatus();
  const Json& required = schema["required"];
  if (!required.is_array()) return Refused(place, "required", "is no array of names");
  for (const Json& name : required) {
    if (name.is_string() && schema.contains("properties") &&
        schema["properties"].contains(name.get<std::string>())) {
      continue;
    }
    return Refused(place, "required",
                   Str("has ", Cut(name.dump(), kShown), ", which is not among properties"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> PrepareSchema(std::string_view text) {
  if (const size_t bad = FindInvalidUtf8(text); bad != std::string_view::npos) {
    return InvalidArgument("is not valid UTF-8 at byte ", bad);
  }
  // Bounds nesting, and allows no name twice.
  TREADLE_RETURN_IF_ERROR(ParseJsonObject(text, "the schema").status());
  return Preparation(Json::parse(text)).Run();
}

}  // namespace treadle
