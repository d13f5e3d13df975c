// config.json of a Hugging Face folder: the first byte says whose weights lie beside it.
#include <filesystem>

#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"

namespace treadle {
namespace {

void Run(std::string_view bytes) {
  // A folder for each model, with a link to its weights.
  static const ScratchFolder* const folder = [] {
    static const ScratchFolder made;
    for (size_t i = 0; i < TestedModels().size(); ++i) {
      const std::string own = made.File(std::to_string(i));
      std::filesystem::create_directory(own);
      std::filesystem::create_symlink(TestedModels()[i] + "/model.safetensors",
                                      own + "/model.safetensors");
    }
    return &made;
  }();
  FuzzInput input(bytes);
  const std::string own = std::to_string(input.Choose(TestedModels().size()));
  folder->Write(own + "/config.json", input.Part());
  folder->Write(own + "/generation_config.json", input.Part());
  UseCheckpoint(folder->File(own));
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const std::string& model : TestedModels()) {
    seeds.push_back(static_cast<char>(seeds.size()) + ReadWhole(model + "/config.json"));
  }
  return seeds;
}

}  // namespace

const FuzzTarget kConfigJsonTarget = {"config_json", 4096, Seeds, Run};

}  // namespace treadle
