#include "base/version.h"

namespace treadle {

const char* const kVersion = TREADLE_RELEASE "+" TREADLE_DIGESTS;

}  // namespace treadle
