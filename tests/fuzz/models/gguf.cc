// GGUF files: all of them is read, told, loaded and run, and their tokenizers are used.
#include "models/checkpoints/gguf/gguf_file.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/checkpoint_files.h"
#include "tests/fuzz/models/use_tokenizer.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

void Run(std::string_view bytes) {
  static const ScratchFolder folder;
  const std::string path = folder.Write("model.gguf", bytes);
  UseCheckpoint(path);
  const auto file = GgufFile::Read(path);
  if (!file.ok()) return;
  auto spec = ReadGgufTokenizer(**file);
  if (!spec.ok() || !spec->has_value()) return;
  const auto tokenizer = Tokenizer::Create(**std::move(spec));
  if (tokenizer.ok()) UseTokenizer(**tokenizer, "a text, it's 12 <s>words");
}

std::vector<std::string> Seeds() {
  const ScratchFolder folder;
  std::vector<std::string> seeds;
  for (const char* format : {"q8_0", "q4_1", "f16"}) {
    for (const bool tokenizer : {true, false}) {
      const TinyModelOptions options = {.format = format,
                                        .layers = 1,
                                        .hidden = 32,
                                        .heads = 1,
                                        .kv_heads = 1,
                                        .ffn_hidden = 32,
                                        .tokenizer = tokenizer};
      seeds.push_back(ReadWhole(*WriteTinyLlamaGguf(folder.path(), options)));
      seeds.push_back(ReadWhole(*WriteTinyGpt2Gguf(folder.path(), options)));
    }
  }
  return seeds;
}

}  // namespace

// The tiny models, whole.
const FuzzTarget kGgufTarget = {"gguf", 60000, Seeds, Run};

}  // namespace treadle
