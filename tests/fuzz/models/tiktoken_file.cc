// tiktoken.model and the tokenizer_config.json beside it: an input is a text and the configuration,
// each up to a zero, then the vocabulary.
#include "models/text/tiktoken_file.h"

#include "base/status.h"
#include "models/text/tokenizer_json.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"
#include "tests/fuzz/models/use_tokenizer.h"

namespace treadle {
namespace {

constexpr const char* kConfig = "tokenizer_config.json";

void Run(std::string_view bytes) {
  static const ScratchFolder folder;
  FuzzInput input(bytes);
  const std::string_view text = input.Part();
  folder.Write(kConfig, input.Part());
  folder.Write(kTiktokenFile, input.Rest());
  FolderFiles files(folder.path());
  const auto spec = ReadTokenizerJson(files);
  if (!spec.ok()) return;
  const auto tokenizer = Tokenizer::Create(*spec);
  if (tokenizer.ok()) UseTokenizer(**tokenizer, text);
}

// A vocabulary whose tokens are all bytes and some words, and one that is cut off.
std::vector<std::string> Seeds() {
  const std::string folder = TREADLE_TESTDATA "/tokenizers/kimi-k2/";
  const std::string before = std::string("a text, it's 12 [EOS]words \xe4\xb8\xad") + '\0' +
                             ReadWhole(folder + kConfig) + '\0';
  return {before + ReadWhole(folder + kTiktokenFile), before + "YQ== 0\nYg== 1\nYWI= 2\n",
          before + "YQ== 0\nYQ== 1\n"};
}

}  // namespace

const FuzzTarget kTiktokenFileTarget = {"tiktoken_file", 16384, Seeds, Run};

}  // namespace treadle
