#include "base/status.h"

#include <cstdio>
#include <cstdlib>

namespace treadle {

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "treadle: bug at %s:%d: '%s' does not hold\n", file, line, condition);
  std::abort();
}

}  // namespace treadle
