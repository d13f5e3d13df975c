// The program's version, as set in the root CMakeLists.txt.
#pragma once

namespace treadle {

inline constexpr char kVersion[] = TREADLE_VERSION;

}  // namespace treadle
