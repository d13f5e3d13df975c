// --random-model, which stands in for --model where a benchmark runs an engine of its own.
#pragma once

#include "server/configuration.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace treadle {

// After AddServeFlags of the same options.
CLI::Option* AddRandomModelFlag(CLI::App& command, ServeOptions& options);

}  // namespace treadle
