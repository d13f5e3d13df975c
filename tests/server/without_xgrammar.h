// For tests of constraints, which a build without XGrammar refuses.
#pragma once

#include <string_view>

namespace treadle {

inline constexpr char kWithoutXGrammar[] = "built without XGrammar (TREADLE_XGRAMMAR)";

// Whether that is why a constraint was refused with this error.
inline bool IsWithoutXGrammar(std::string_view error) {
  return error.find(kWithoutXGrammar) != std::string_view::npos;
}

}  // namespace treadle
