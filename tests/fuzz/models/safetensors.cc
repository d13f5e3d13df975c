// The header of model.safetensors, and the index of several files: the first byte says whose
// config.json lies beside it, the second one whether there is an index; then come the index and the
// header, each up to a zero, and data. A header's length is right, or as
// the header itself begins.
#include "models/checkpoints/huggingface/safetensors.h"

#include <cstring>
#include <filesystem>

#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"
#include "tests/models/checkpoints/safetensors_file.h"

namespace treadle {
namespace {

enum Shape : uint8_t { kPlain, kIndexed, kOwnLength, kShapes };

void Run(std::string_view bytes) {
  static const ScratchFolder folder;
  FuzzInput input(bytes);
  const std::string& model = TestedModels()[input.Choose(TestedModels().size())];
  const size_t shape = input.Choose(kShapes);
  const std::string_view index = input.Part(), header = input.Part(), data = input.Rest();
  folder.Write("config.json", ReadWhole(model + "/config.json"));
  const auto file = shape == kOwnLength ? std::string(header) + std::string(data)
                                        : Safetensors::Join(std::string(header), std::string(data));
  const std::string index_file = folder.File("model.safetensors.index.json");
  std::filesystem::remove(index_file);
  std::filesystem::remove(folder.File("model.safetensors"));
  if (shape == kIndexed) folder.Write("model.safetensors.index.json", index);
  folder.Write(shape == kIndexed ? "a.safetensors" : "model.safetensors", file);
  UseCheckpoint(folder.path());
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const std::string& model : TestedModels()) {
    const Safetensors file = Safetensors::Parse(ReadWhole(model + "/model.safetensors"));
    const std::string begin = {static_cast<char>(&model - TestedModels().data()),
                               static_cast<char>(kPlain), '\0'};
    if (file.data.size() > 30000) continue;
    seeds.push_back(begin + file.header.dump() + '\0' + file.data);
    if (seeds.size() > 1) continue;
    nlohmann::json index;
    for (const auto& [name, entry] : file.header.items()) {
      if (name != "__metadata__") index["weight_map"][name] = "a.safetensors";
    }
    seeds.push_back(std::string{begin[0], static_cast<char>(kIndexed)} + index.dump() + '\0' +
                    file.header.dump() + '\0' + file.data);
  }
  return seeds;
}

}  // namespace

// The small quantized models, whole.
const FuzzTarget kSafetensorsTarget = {"safetensors", 40000, Seeds, Run};

}  // namespace treadle
