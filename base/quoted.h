// Text from a file, as an error message shows it.
#pragma once

#include <string>
#include <string_view>

namespace treadle {

// In single quotes, on one line: other than printable ASCII as \xNN, and only so much of it.
inline std::string Quoted(std::string_view text) {
  constexpr size_t kMax = 100;
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out = "'";
  for (const char c : text.substr(0, kMax)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
    } else {
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return out + (text.size() > kMax ? "...'" : "'");
}

}  // namespace treadle
