// Names of tests that come from tables, as GoogleTest wants them.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>

namespace treadle {

// Replaces every character but letters and digits by an underscore.
inline std::string Identifier(std::string name) {
  std::ranges::replace_if(
      name, [](unsigned char c) { return std::isalnum(c) == 0; }, '_');
  return name;
}

}  // namespace treadle
