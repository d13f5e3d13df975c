// A tokenizer as data, read from GGUF metadata or tokenizer.json; Tokenizer::Create builds from it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace treadle {

enum class TokenKind : uint8_t { kNormal, kUnknown, kControl, kUserDefined, kUnused, kByte };

struct TokenizerSpec {
  enum class Model { kByteLevelBpe, kSentencePiece };
  Model model = Model::kByteLevelBpe;

  // By id. Byte-level BPE keeps GPT-2's printable mapping of bytes in `text`; SentencePiece keeps
  // its own spelling ("\u2581" for space, "<0xNN>" for bytes). Added and special tokens are plain
  // text.
  struct Token {
    std::string text;
    float score = 0;  // SentencePiece (GGUF); merges rank otherwise
    TokenKind kind = TokenKind::kNormal;
    bool trim_left = false;   // added tokens: takes the white space before it along
    bool trim_right = false;  // and after it
  };
  std::vector<Token> tokens;
  std::vector<std::pair<std::string, std::string>> merges;  // in rank order

  // Byte-level BPE: name of the pre-tokenizer ("gpt-2", "smollm", "llama-bpe", "qwen2").
  std::string pre_tokenizer;
  bool ignore_merges = false;  // whole-vocabulary words are taken as they are
  bool add_space_prefix =
      false;  // SentencePiece's dummy prefix, on each text between special tokens
  bool space_prefix_at_start_only = false;  // ... only where the whole text begins
  bool space_prefix_if_missing = false;     // ... and only if no space is there already
  bool add_bos = false;
  bool add_eos = false;
  int32_t bos = -1;
  int32_t eos = -1;
  int32_t unknown = -1;
  int32_t padding = -1;
  std::vector<int32_t> end_ids;  // eos, eot, generation_config's list: generation stops at any
};

}  // namespace treadle
