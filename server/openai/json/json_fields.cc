#include "server/openai/json/json_fields.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "base/json_file.h"
#include "base/nearest.h"
#include "base/status.h"
#include "base/utf8.h"

namespace treadle {

using Json = nlohmann::json;

absl::Status Expected(std::string_view name, const Json& value, std::string_view expected) {
  return InvalidArgument(name, " is ", Cut(value.dump(), kShown), ", expected ", expected);
}

absl::Status Unsupported(std::string_view where, std::string_view name,
                         std::span<const std::string_view> known) {
  return InvalidArgument(where, Cut(Printable(name), kShown), " is not supported",
                         DidYouMean(name, known));
}

absl::StatusOr<bool> ReadBool(std::string_view name, const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  return Expected(name, value, "true or false");
}

absl::StatusOr<std::string> ReadText(std::string_view name, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  return Expected(name, value, "a string");
}

std::optional<Json> WholeNumber(const Json& value) {
  if (value.is_number_integer()) return value;
  const double number = value.is_number_float() ? value.get<double>() : NAN;
  if (number != std::floor(number) || std::abs(number) >= 0x1p63) return std::nullopt;
  return Json(static_cast<int64_t>(number));
}

absl::StatusOr<int32_t> ReadInt(std::string_view name, const Json& value) {
  using Limits = std::numeric_limits<int32_t>;
  const std::optional<Json> whole = WholeNumber(value);
  const std::optional<int64_t> number =
      whole ? IntegerIn(*whole, Limits::min(), Limits::max()) : std::nullopt;
  // Above the signed numbers IntegerIn sees a negative one.
  const bool wraps = whole && whole->is_number_unsigned() && whole->get<uint64_t>() > Limits::max();
  if (number && !wraps) return static_cast<int32_t>(*number);
  return Expected(name, value, "a whole number of 32 bits");
}

absl::StatusOr<std::vector<int32_t>> ReadIds(const std::string& name, const Json& value) {
  if (!value.is_array()) return Expected(name, value, "an array of token ids");
  std::vector<int32_t> ids;
  ids.reserve(value.size());
  for (const Json& id : value) {
    const auto read = ReadInt("", id);
    if (!read.ok()) return Expected(Str(name, "[", ids.size(), "]"), id, "a token id");
    ids.push_back(*read);
  }
  return ids;
}

absl::Status Required(std::string_view name, const std::string& text) {
  return text.empty() ? InvalidArgument(name, " is missing") : absl::OkStatus();
}

absl::Status ReadMembers(const std::string& name, const Json& object,
                         const std::vector<Member>& members,
                         std::span<const std::string_view> passed_over) {
  if (!object.is_object()) return Expected(name, object, "an object");
  for (const auto& [key, value] : object.items()) {
    const auto member = std::ranges::find(members, key, &Member::name);
    if (value.is_null() || std::ranges::count(passed_over, key) > 0) continue;
    if (member == members.end()) {
      std::vector<std::string_view> known;
      for (const Member& other : members) known.push_back(other.name);
      return Unsupported(name + ".", key, known);
    }
    TREADLE_RETURN_IF_ERROR(member->read(name + "." + key, value));
  }
  return absl::OkStatus();
}

}  // namespace treadle
