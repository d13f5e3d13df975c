// tokenizer.json and what stands beside it: an input is a text, then the three files, each up to a
// zero.
#include "models/text/tokenizer_json.h"

#include <nlohmann/json.hpp>

#include "base/json_file.h"
#include "base/status.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"
#include "tests/fuzz/models/use_tokenizer.h"

namespace treadle {
namespace {

constexpr const char* kFiles[] = {"tokenizer.json", "tokenizer_config.json",
                                  "generation_config.json"};

void Run(std::string_view bytes) {
  static const ScratchFolder folder;
  FuzzInput input(bytes);
  const std::string_view text = input.Part();
  for (const char* file : kFiles) folder.Write(file, input.Part());
  FolderFiles files(folder.path());
  const auto spec = ReadTokenizerJson(files);
  if (!spec.ok()) return;
  const auto tokenizer = Tokenizer::Create(*spec);
  if (tokenizer.ok()) UseTokenizer(**tokenizer, text);
}

// The tests' tokenizers, with the part of their vocabularies that their first merges need.
std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const char* name : {"gpt-2", "llama", "llama-bpe", "mistral", "qwen2", "smollm"}) {
    const std::string folder = TREADLE_TESTDATA "/tokenizers/" + std::string(name) + "/";
    auto json = *ReadJsonFile(folder + kFiles[0]);
    auto& merges = json.at("model").at("merges");
    while (merges.size() > 8) merges.erase(merges.size() - 1);
    seeds.push_back(std::string("a text, it's 12 <s>words") + '\0' + json.dump() + '\0' +
                    ReadWhole(folder + kFiles[1]) + '\0' + "{\"eos_token_id\": [0, 2]}");
  }
  return seeds;
}

}  // namespace

const FuzzTarget kTokenizerJsonTarget = {"tokenizer_json", 16384, Seeds, Run};

}  // namespace treadle
