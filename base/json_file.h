// Reads a JSON object from a file, without exceptions.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace treadle {

class MappedFile;

// NotFound if it cannot be opened; InvalidArgument unless it is one JSON object, at most 64 levels
// deep, in which no object has a key twice. A number that Python writes as Infinity is read as
// {"__float__": "Infinity"}, as transformers writes it.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path);
// The same of an open file; its CheckUnchanged's errors, too.
absl::StatusOr<nlohmann::json> ParseJsonFile(const MappedFile& file);
// `text` as a JSON object; `path` is named in the error. InvalidArgument also if there are more
// than `most_values` strings, keys, arrays and objects, each of which takes up to a hundred bytes.
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& path,
                                               size_t most_values = SIZE_MAX);

// `text` as the text of a JSON object, with each key once: a repeated one has its first place and
// its last value, as most readers take it. InvalidArgument as above, but for that.
absl::StatusOr<std::string> WithKeysOnce(std::string_view text);

// The text of a member of `object`, a JSON object that ParseJsonObject has taken, as it stands
// there: members of parsed objects lose their order. Empty if it has none of that name.
std::string_view MemberText(std::string_view object, std::string_view name);

// Nothing unless it is an integer from `least` to `most`.
std::optional<int64_t> IntegerIn(const nlohmann::json& value, int64_t least, int64_t most);

}  // namespace treadle
