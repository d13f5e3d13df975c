#include "server/openai/json/json_text.h"

#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_replace.h"

namespace treadle {

std::string JsonString(std::string_view text) {
  using Json = nlohmann::json;
  std::string json =
      Json(text).dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  absl::StrReplaceAll({{"\u0085", "\\u0085"}, {"\u2028", "\\u2028"}, {"\u2029", "\\u2029"}}, &json);
  return json;
}

std::string JsonLogprob(float value) {
  constexpr float kLeast = -9999;
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value > kLeast ? value : kLeast).ptr;
  return std::string(text, end);
}

std::string JsonFloats(std::span<const float> values) {
  std::string text = "[";
  for (const float value : values) {
    if (text.size() > 1) text += ',';
    char digits[32];
    const char* const end = std::to_chars(digits, digits + sizeof digits, value).ptr;
    text += std::isfinite(value) ? std::string_view(digits, end) : "null";
  }
  return text + "]";
}

std::string JsonIds(std::span<const int32_t> ids) {
  std::string text = "[";
  for (const int32_t id : ids) {
    if (text.size() > 1) text += ',';
    text += std::to_string(id);
  }
  return text + "]";
}

}  // namespace treadle
