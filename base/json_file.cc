#include "base/json_file.h"

#include <algorithm>
#include <set>
#include <vector>

#include "base/file_calls.h"
#include "base/mapped_file.h"
#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

using Json = nlohmann::json;
constexpr size_t kDeepest = 64;

// Reads the text once before a value is made of it, and stops at the first thing that is wrong:
// broken syntax, nesting too deep for code that follows it by recursion, a key given twice (where
// one reader takes the first and another the last), or too many values with memory of their own.
class Checker : public nlohmann::json_sax<Json> {
 public:
  Checker(size_t most_values, bool keys_once) : most_values_(most_values), keys_once_(keys_once) {}
  const std::string& error() const { return error_; }
  bool repeated() const { return repeated_; }  // a key

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return Count(); }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& name) override {
    if (!Count()) return false;
    if (keys_.back().insert(name).second) return true;
    repeated_ = true;
    if (!keys_once_) return true;
    error_ = Str("key ", Quoted(name), " appears twice in one object");
    return false;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    error_ = Str("is not valid JSON at byte ", position);
    return false;
  }

 private:
  bool Count() {
    if (++values_ <= most_values_) return true;
    error_ = Str("has too many strings, keys, arrays and objects, expected at most ", most_values_);
    return false;
  }
  bool Enter() {
    if (!Count()) return false;
    keys_.emplace_back();
    if (keys_.size() <= kDeepest) return true;
    error_ = Str("is nested more than ", kDeepest, " levels deep");
    return false;
  }
  bool Leave() {
    keys_.pop_back();
    return true;
  }

  const size_t most_values_;
  const bool keys_once_;
  size_t values_ = 0;
  bool repeated_ = false;
  std::vector<std::set<std::string>> keys_;  // of each object or array that is open
  std::string error_;
};

absl::Status Check(std::string_view text, const std::string& path, Checker& checker) {
  // The parser takes a zero byte for the end of the text.
  if (const size_t zero = text.find('\0'); zero != text.npos) {
    return InvalidArgument(path, ": is not valid JSON at byte ", zero + 1);
  }
  if (Json::sax_parse(text, &checker)) return absl::OkStatus();
  return InvalidArgument(path, ": ", checker.error());
}

// Behind the string or the value that begins at `at` in valid JSON.
size_t BehindString(std::string_view text, size_t at) {
  for (++at; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return at + 1;
}
size_t BehindValue(std::string_view text, size_t at) {
  for (int depth = 0; at < text.size();) {
    const char c = text[at];
    depth += (c == '{' || c == '[') - (c == '}' || c == ']');
    at = c == '"' ? BehindString(text, at) : at + 1;
    if (depth > 0) continue;
    const bool whole = c == '"' || c == '}' || c == ']';
    return whole ? at : std::min(text.find_first_of(" \t\r\n,}", at), text.size());
  }
  return text.size();
}

}  // namespace

std::string_view MemberText(std::string_view object, std::string_view name) {
  size_t at = object.find('{');
  while ((at = object.find('"', at)) != std::string_view::npos) {
    const size_t key_end = BehindString(object, at);
    const Json key = Json::parse(object.substr(at, key_end - at), nullptr, false);
    const size_t value = object.find_first_not_of(" \t\r\n:", key_end);
    if (value == std::string_view::npos) break;
    const size_t end = BehindValue(object, value);
    if (key == name) return object.substr(value, end - value);
    at = end;
  }
  return {};
}

absl::StatusOr<Json> ParseJsonObject(std::string_view text, const std::string& path,
                                     size_t most_values) {
  Checker checker(most_values, /*keys_once=*/true);
  TREADLE_RETURN_IF_ERROR(Check(text, path, checker));
  Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) return InvalidArgument(path, ": expected a JSON object");
  return value;
}

absl::StatusOr<std::string> WithKeysOnce(std::string_view text) {
  Checker checker(SIZE_MAX, /*keys_once=*/false);
  TREADLE_RETURN_IF_ERROR(Check(text, "", checker));
  const auto value = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) return InvalidArgument("expected a JSON object");
  return checker.repeated() ? value.dump() : std::string(text);
}

namespace {

// As ParseJsonObject, and a number may be Python's Infinity.
absl::StatusOr<Json> ParseText(std::string_view text, const std::string& path) {
  constexpr std::string_view kInfinity = "Infinity";
  if (text.find(kInfinity) == text.npos) return ParseJsonObject(text, path);
  std::string finite;
  for (size_t at = 0; at < text.size();) {
    const bool number = text.substr(at, kInfinity.size()) == kInfinity;
    const size_t end = text[at] == '"' ? std::min(BehindString(text, at), text.size())
                       : number        ? at + kInfinity.size()
                                       : at + 1;
    finite += number ? R"({"__float__": "Infinity"})" : text.substr(at, end - at);
    at = end;
  }
  return ParseJsonObject(finite, path);
}

}  // namespace

absl::StatusOr<Json> ReadJsonFile(const std::string& path) {
  TREADLE_ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  return ParseJsonFile(*file);
}

absl::StatusOr<Json> ParseJsonFile(const MappedFile& file) {
  FileCalls::Get().Use(file.path());
  absl::StatusOr<Json> json = ParseText(file.text(), file.path());
  TREADLE_RETURN_IF_ERROR(file.CheckUnchanged());  // it would be why
  return json;
}

std::optional<int64_t> IntegerIn(const Json& value, int64_t least, int64_t most) {
  if (!value.is_number_integer()) return std::nullopt;
  const auto number = value.get<int64_t>();
  return number >= least && number <= most ? std::optional(number) : std::nullopt;
}

}  // namespace treadle
