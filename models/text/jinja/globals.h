// The functions that every template sees.
#pragma once

#include <string>

#include "models/text/jinja/value.h"

namespace treadle::jinja {

// range, namespace, dict, raise_exception and strftime_now. The latter tells `now`, "YYYY-MM-DD" or
// "YYYY-MM-DD HH:MM:SS", or else, if that is empty, the clock's local time.
Dict GlobalFunctions(const std::string& now);

}  // namespace treadle::jinja
