// Vocabularies as the readers of files give them, SentencePiece's above all: an input is a text,
// and tokens with scores, kinds and merges.
#include "models/text/tokenizer.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/models/use_tokenizer.h"

namespace treadle {
namespace {

constexpr int kKinds = 6;

void Run(std::string_view bytes) {
  FuzzInput input(bytes);
  TokenizerSpec spec;
  const uint8_t flags = input.Byte();
  if ((flags & 1) != 0) spec.model = TokenizerSpec::Model::kSentencePiece;
  spec.add_space_prefix = (flags & 2) != 0;
  spec.space_prefix_at_start_only = (flags & 4) != 0;
  spec.space_prefix_if_missing = (flags & 8) != 0;
  spec.add_bos = (flags & 16) != 0;
  spec.add_eos = (flags & 32) != 0;
  spec.ignore_merges = (flags & 64) != 0;
  const bool all_bytes = (flags & 128) != 0;
  for (int32_t* id : {&spec.bos, &spec.eos, &spec.unknown, &spec.padding}) *id = input.Byte() - 1;
  spec.end_ids = {spec.eos};
  spec.pre_tokenizer = (flags & 8) != 0 ? "qwen2" : "llama-bpe";
  const std::string_view text = input.Short();
  if (all_bytes) {
    for (int byte = 0; byte < 256; ++byte) {
      const char digits[] = "0123456789ABCDEF";
      spec.tokens.push_back(
          {std::string("<0x") + digits[byte / 16] + digits[byte % 16] + ">", 0, TokenKind::kByte});
    }
  }
  while (!input.empty()) {
    const uint8_t kind = input.Byte();
    const auto score = input.Number<float>();
    const std::string_view left = input.Short();
    if (kind >= 128) {  // a merge
      spec.merges.emplace_back(left, input.Short());
      continue;
    }
    spec.tokens.push_back({std::string(left), score, static_cast<TokenKind>(kind % kKinds),
                           (kind & 32) != 0, (kind & 64) != 0});
  }
  const auto tokenizer = Tokenizer::Create(std::move(spec));
  if (tokenizer.ok()) UseTokenizer(**tokenizer, text);
}

std::vector<std::string> Seeds() {
  using namespace std::string_literals;
  const auto begin = [](int flags, const std::string& text) {
    return static_cast<char>(flags) + "\1\2\1\0"s + static_cast<char>(text.size()) + text;
  };
  const auto token = [](TokenKind kind, float score, const std::string& text) {
    return static_cast<char>(kind) + std::string(reinterpret_cast<const char*>(&score), 4) +
           static_cast<char>(text.size()) + text;
  };
  const auto merge = [](const std::string& left, const std::string& right) {
    return "\x80\0\0\0\0"s + static_cast<char>(left.size()) + left +
           static_cast<char>(right.size()) + right;
  };
  const std::string special = token(TokenKind::kControl, 0, "<s>") +
                              token(TokenKind::kUserDefined, 0, "<user>") +
                              token(TokenKind::kUnknown, 0, "<unk>");
  std::string letters;
  for (const char* text : {"a", "b", "c", "\xe2\x96\x81", "ab", "bc", "abc",
                           "\xe2\x96\x81"
                           "ab"}) {
    letters += token(TokenKind::kNormal, -static_cast<float>(letters.size()), text);
  }
  return {begin(1 | 2 | 128, "abc ab<user>x \xc3\xa9") + special + letters,
          begin(1 | 2 | 4 | 16 | 32, " cab<s>abc") + special + letters,
          begin(0, "abc<user> cab") + special + letters + merge("a", "b") + merge("ab", "c"),
          begin(64 | 8, "abcabc") + special + letters + merge("b", "c") + merge("a", "bc")};
}

}  // namespace

const FuzzTarget kVocabularyTarget = {"vocabulary", 2048, Seeds, Run};

}  // namespace treadle
