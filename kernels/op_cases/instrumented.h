// Whether a sanitizer watches this build. What takes minutes then, and would show it nothing new,
// may be thinned out. ThreadSanitizer makes emulated GPUs hardest: every switch between a kernel's
// threads is told to it.
#pragma once

namespace treadle {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kInstrumented = true;
#else
inline constexpr bool kInstrumented = false;
#endif
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

}  // namespace treadle
