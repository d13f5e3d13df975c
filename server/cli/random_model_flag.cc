#include "server/cli/random_model_flag.h"

#include <CLI/CLI.hpp>

#include "base/status.h"
#include "models/checkpoints/random/random_checkpoint.h"

namespace treadle {

CLI::Option* AddRandomModelFlag(CLI::App& command, ServeOptions& options) {
  CLI::Option* const flag = command.add_option_function<std::string>(
      "--random-model",
      [&options](const std::string& shape) {
        options.model = Str(RandomCheckpoint::kPrefix, shape);
      },
      Str("instead of --model: random weights in the shape of ", RandomCheckpoint::Shapes(),
          "; changed by ',layers=4' and the like"));
  return flag->type_name("SHAPE")->excludes(command.get_option("--model"));
}

}  // namespace treadle
