// Which of this machine's addresses the data plane listens on.
//
// Thread safety: pure function of the machine's interfaces.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace treadle {

// The numeric address of `name`: an interface's name, one of this machine's addresses, or a host
// name that resolves to one. IPv4 is preferred. InvalidArgument, naming what there is.
absl::StatusOr<std::string> ResolveDataInterface(const std::string& name);

}  // namespace treadle
