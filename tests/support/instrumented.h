// Whether a sanitizer watches this build. What takes minutes then, and would show it nothing new,
// may be thinned out.
#pragma once

namespace treadle {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif

}  // namespace treadle
