#include "tests/support/tiny_tokenizer.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

namespace treadle {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kTemplate =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}";

std::string Utf8(int code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

// GPT-2's printable spelling of a byte: itself if printable, else the next character from U+0100
// on.
std::vector<std::string> ByteTokens() {
  std::vector<std::string> tokens(256);
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
    tokens[byte] = Utf8(printable ? byte : next++);
  }
  return tokens;
}

struct TinyVocabularyTable {
  std::vector<std::string> tokens;
  std::vector<std::string> merges;  // "a b"
  std::vector<int32_t> kinds;       // GGUF's: 1 normal, 3 control
};

TinyVocabularyTable MakeVocabulary() {
  TinyVocabularyTable table;
  table.tokens = ByteTokens();
  const std::string space = table.tokens[' '];
  const std::pair<std::string, std::string> merges[] = {
      {"t", "h"},   {"th", "e"}, {space, "the"}, {"i", "n"},    {"e", "r"}, {space, "a"},
      {"o", "n"},   {"a", "n"},  {"an", "d"},    {"l", "l"},    {"o", "r"}, {"e", "n"},
      {space, "w"}, {"r", "e"},  {"in", "g"},    {space, "and"}};
  for (const auto& [left, right] : merges) {
    table.merges.push_back(left + " " + right);
    table.tokens.push_back(left + right);
  }
  table.kinds.assign(table.tokens.size(), 1);
  for (const char* special : {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}) {
    table.tokens.push_back(special);
    table.kinds.push_back(3);
  }
  return table;
}

}  // namespace

int32_t TinyVocabulary() { return static_cast<int32_t>(MakeVocabulary().tokens.size()); }
int32_t TinyEndOfTurn() { return TinyVocabulary() - 1; }

void AddTinyTokenizer(bool chat_template, GgufWriter& writer) {
  const TinyVocabularyTable table = MakeVocabulary();
  const auto last = static_cast<uint32_t>(table.tokens.size() - 1);
  writer.AddString("tokenizer.ggml.model", "gpt2");
  writer.AddString("tokenizer.ggml.pre", "gpt-2");
  writer.AddStrings("tokenizer.ggml.tokens", table.tokens);
  writer.AddI32s("tokenizer.ggml.token_type", table.kinds);
  writer.AddStrings("tokenizer.ggml.merges", table.merges);
  writer.AddU32("tokenizer.ggml.bos_token_id", last - 2);
  writer.AddU32("tokenizer.ggml.unknown_token_id", last - 2);
  writer.AddU32("tokenizer.ggml.eos_token_id", last);
  writer.AddBool("tokenizer.ggml.add_bos_token", false);
  if (chat_template) writer.AddString("tokenizer.chat_template", kTemplate);
}

std::string TinyTokenizerJson() {
  const TinyVocabularyTable table = MakeVocabulary();
  Json vocabulary = Json::object(), added = Json::array();
  for (size_t i = 0; i < table.tokens.size(); ++i) {
    if (table.kinds[i] == 1) {
      vocabulary[table.tokens[i]] = i;
    } else {
      added.push_back({{"id", i},
                       {"content", table.tokens[i]},
                       {"single_word", false},
                       {"lstrip", false},
                       {"rstrip", false},
                       {"normalized", false},
                       {"special", true}});
    }
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", true}};
  return Json({{"version", "1.0"},
               {"added_tokens", added},
               {"normalizer", nullptr},
               {"pre_tokenizer", byte_level},
               {"post_processor", nullptr},
               {"decoder", byte_level},
               {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", table.merges}}}})
      .dump();
}

std::string TinyTokenizerConfigJson(bool chat_template) {
  Json config = {{"bos_token", "<|endoftext|>"}, {"eos_token", "<|im_end|>"}};
  if (chat_template) config["chat_template"] = kTemplate;
  return config.dump(2);
}

}  // namespace treadle
