// How values of serve's flags are read and shown: what several flags have in common.
//
// Pure. What reads says in its error what was found and what was expected; the caller adds the
// flag's name.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/configuration.h"

namespace treadle {

using ReadFlag = std::function<absl::Status(ServeOptions&, const std::string&)>;
using ShowFlag = std::function<std::string(const ServeOptions&)>;

ReadFlag ReadInteger(int64_t ServeOptions::*field, int64_t low, int64_t high);
ShowFlag ShowInteger(int64_t ServeOptions::*field, std::string if_zero = "0");

ReadFlag ReadText(std::string ServeOptions::*field);
ShowFlag ShowText(std::string ServeOptions::*field);  // "none" if it is empty

ReadFlag ReadChoice(std::string ServeOptions::*field, std::vector<std::string> choices);

ReadFlag ReadDuration(std::chrono::milliseconds ServeOptions::*field);
ShowFlag ShowDuration(std::chrono::milliseconds ServeOptions::*field);

ReadFlag ReadSwitch(bool ServeOptions::*field);  // "on" or "off"
ShowFlag ShowSwitch(bool ServeOptions::*field);

// "512", "64K", "100M", "2G", "1.5G" (powers of 1024) and "30s", "500ms", "2m".
absl::StatusOr<int64_t> ParseSize(const std::string& text);
absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text);
std::string ShowBytes(int64_t bytes);  // "512M", or a plain number

}  // namespace treadle
