// Fields of a client's JSON, read by their type. Each error is InvalidArgument and says the field's
// name, its value and what was expected. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

// Strings, keys, arrays and objects of a body: a conversation of the most messages has a fifth.
inline constexpr size_t kMaxJsonValues = 1 << 17;
inline constexpr size_t kShown = 60;  // bytes of a bad value in an error

absl::Status Expected(std::string_view name, const nlohmann::json& value,
                      std::string_view expected);
// A field `name` within `where` ("stream_options.", or nothing) that is none of `known`.
absl::Status Unsupported(std::string_view where, std::string_view name,
                         std::span<const std::string_view> known);
absl::StatusOr<bool> ReadBool(std::string_view name, const nlohmann::json& value);
absl::StatusOr<std::string> ReadText(std::string_view name, const nlohmann::json& value);
// The value as an integer; nothing if it has a fraction, or is none. Clients whose numbers are all
// floating-point ones write 4.0.
std::optional<nlohmann::json> WholeNumber(const nlohmann::json& value);
absl::StatusOr<int32_t> ReadInt(std::string_view name, const nlohmann::json& value);
absl::StatusOr<std::vector<int32_t>> ReadIds(const std::string& name, const nlohmann::json& value);

// A text that must be there has at least one byte.
absl::Status Required(std::string_view name, const std::string& text);

struct Member {
  std::string_view name;
  std::function<absl::Status(const std::string& name, const nlohmann::json& value)> read;
};
// An object of these members. One that is null is absent, one of `passed_over` too; of another name
// it is refused.
absl::Status ReadMembers(const std::string& name, const nlohmann::json& object,
                         const std::vector<Member>& members,
                         std::span<const std::string_view> passed_over = {});

// Where a value that was read goes.
template <typename T>
absl::Status Set(absl::StatusOr<T> value, auto& to) {
  if (value.ok()) to = *std::move(value);
  return value.status();
}

}  // namespace treadle
