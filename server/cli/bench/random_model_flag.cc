#include "server/cli/bench/random_model_flag.h"

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/checkpoints/random/random_checkpoint.h"

namespace treadle {

CLI::Option* AddRandomModelFlag(CLI::App& command, std::string& model, const char* help) {
  CLI::Option* const flag = command.add_option_function<std::string>(
      "--random-model", [&model](const std::string& shape) { model = Str(kRandomPrefix, shape); },
      Str(help, RandomShapes(), "; changed by ',layers=4' and the like"));
  return flag->type_name("SHAPE");
}

}  // namespace treadle
