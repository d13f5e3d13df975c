// Where the log of a server or a worker goes, as flags.
//
// Thread safety: OpenLog before other threads start.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/observe/log.h"

namespace CLI {
class App;
}

namespace treadle {

// --log-format, --log-level and --log-file, named as serve's.
void AddLogFlags(CLI::App& app, Log::Options& options);

// With a file, SIGHUP is ignored from now on: programs that rotate logs like to send it, and a file
// that was renamed is opened anew without it.
absl::StatusOr<std::unique_ptr<Log>> OpenLog(const Log::Options& options);

}  // namespace treadle
