#include "server/openai/json_fields.h"

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

absl::StatusOr<int32_t> ReadInt(std::string_view name, const Json& value) {
  using Limits = std::numeric_limits<int32_t>;
  const std::optional<int64_t> number = IntegerIn(value, Limits::min(), Limits::max());
  // Above the signed numbers IntegerIn sees a negative one.
  const bool wraps = value.is_number_unsigned() && value.get<uint64_t>() > Limits::max();
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

}  // namespace treadle
