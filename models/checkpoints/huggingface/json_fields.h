// Fields of config.json and of objects in it.
//
// Thread safety: immutable.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/json_file.h"
#include "base/status.h"

namespace treadle {

// A value as an error message shows it: on one line, and only so much of it.
inline std::string JsonText(const nlohmann::json& value) {
  constexpr size_t kMax = 100;
  const std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  return text.size() > kMax ? text.substr(0, kMax) + "..." : text;
}

inline bool IsFinite(const nlohmann::json& value) {
  return value.is_number() && std::isfinite(value.get<double>());
}

// Typed access to one JSON object, with errors that name file and field.
class JsonFields {
 public:
  using Json = nlohmann::json;

  JsonFields(const Json& json, std::string path) : json_(json), path_(std::move(path)) {}

  const Json& At(const std::string& name) const {
    static const Json null;
    const auto found = json_.find(name);
    return found == json_.end() ? null : *found;
  }
  bool Has(const std::string& name) const { return !At(name).is_null(); }

  template <typename Value>
  absl::Status Wrong(const std::string& name, const Value& expected) const {
    const Json& found = At(name);
    return InvalidArgument(path_, ": ", name, " is ", found.is_null() ? "missing" : JsonText(found),
                           ", expected ", expected);
  }

  absl::StatusOr<int64_t> Integer(const std::string& name, std::optional<int64_t> otherwise = {},
                                  int64_t least = 1) const {
    const Json& value = At(name);
    if (value.is_null() && otherwise) return *otherwise;
    if (IntegerIn(value, least, int64_t{1} << 40)) return value.get<int64_t>();
    return Wrong(name, least > 0 ? "a positive integer" : "a positive integer or 0");
  }
  absl::StatusOr<double> Number(const std::string& name,
                                std::optional<double> otherwise = {}) const {
    const Json& value = At(name);
    if (value.is_null() && otherwise) return *otherwise;
    if (IsFinite(value)) return value.get<double>();
    return Wrong(name, "a number");
  }
  absl::StatusOr<std::vector<double>> Numbers(const std::string& name, int64_t count) const {
    const Json& value = At(name);
    if (value.is_array() && std::ssize(value) == count && std::ranges::all_of(value, IsFinite)) {
      return value.get<std::vector<double>>();
    }
    return Wrong(name, Str("a list of ", count, " numbers"));
  }
  absl::StatusOr<bool> Bool(const std::string& name, bool otherwise) const {
    const Json& value = At(name);
    if (value.is_null()) return otherwise;
    if (value.is_boolean()) return value.get<bool>();
    return Wrong(name, "true or false");
  }
  // The field must be missing, null or `expected`.
  absl::Status Only(const std::string& name, const Json& expected) const {
    if (!Has(name) || At(name) == expected) return absl::OkStatus();
    return Wrong(name, expected.dump());
  }

  const std::string& path() const { return path_; }

 private:
  const Json& json_;
  const std::string path_;
};

}  // namespace treadle
