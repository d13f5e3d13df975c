// Text <-> token ids, exactly as the model's authors' tokenizer does it.
//
// Byte-level BPE (GPT-2, section 2.2) and SentencePiece BPE with byte fallback. Input must be valid
// UTF-8 (InvalidArgument with the offset otherwise). Time is near-linear in the text's length, also
// for hostile input.
//
// Thread safety: constant after Create; all methods may be called from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

enum class TokenKind : uint8_t { kNormal, kUnknown, kControl, kUserDefined, kUnused, kByte };

// A tokenizer as data, read from GGUF metadata or tokenizer.json; Tokenizer::Create builds from it.
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
    // Added tokens: each takes the white space before or behind it along, is found only where no
    // word goes on before or behind it, or is found in the text once that is normalized.
    bool trim_left = false;
    bool trim_right = false;
    bool single_word = false;
    bool normalized = false;
    bool outside_model = false;  // in the list of added tokens alone: no character is one
  };
  std::vector<Token> tokens;
  std::vector<std::pair<std::string, std::string>> merges;  // in rank order

  std::string pre_tokenizer;   // byte-level BPE: a name of models/text/pre_tokenizer.h
  bool ignore_merges = false;  // whole-vocabulary words are taken as they are
  // SentencePiece's dummy prefix, on each text between special tokens
  bool add_space_prefix = false;
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

struct EncodeOptions {
  bool add_special = true;    // BOS/EOS as the model wants them
  bool parse_special = true;  // control tokens' text in the input becomes the token
};

class Tokenizer {
 public:
  // InvalidArgument or Unimplemented for a vocabulary that contradicts itself or is not understood.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(TokenizerSpec spec);
  virtual ~Tokenizer() = default;

  virtual absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                                      const EncodeOptions& options) const = 0;

  // The raw bytes that a token stands for; control tokens give "" unless `special`. Ids outside the
  // vocabulary give "".
  virtual std::string TokenBytes(int32_t id, bool special) const = 0;

  // All bytes of `ids`, invalid UTF-8 replaced by U+FFFD: one for each longest prefix of a
  // character (byte-level BPE), or for each byte (SentencePiece), as the authors do.
  // SentencePiece's leading dummy space is removed, as the authors' decode does. Stops behind
  // `most` bytes: a longer text is not whole.
  std::string Decode(std::span<const int32_t> ids, bool special, size_t most = SIZE_MAX) const;

  const TokenizerSpec& spec() const { return spec_; }
  int32_t size() const { return static_cast<int32_t>(spec_.tokens.size()); }

 protected:
  explicit Tokenizer(TokenizerSpec spec) : spec_(std::move(spec)) {}
  // InvalidArgument, with the offset, unless `text` is valid UTF-8 of a length that ids can count.
  static absl::Status CheckText(std::string_view text);
  // Whether decoding `id` gives any bytes: inside the vocabulary, in use, and no control token
  // unless `special`.
  bool Emits(int32_t id, bool special) const;

  TokenizerSpec spec_;
};

// Incremental decode of one generated sequence: never emits part of a UTF-8 character. Bytes that
// can no longer become a character come out as U+FFFD. Not thread-safe.
class StreamDecoder {
 public:
  // `continues_text`: the sequence follows other text (a prompt), so no leading space is removed.
  StreamDecoder(const Tokenizer& tokenizer, bool special, bool continues_text = true);
  // Text that became complete with this token (possibly empty).
  std::string Push(int32_t id);
  // The bytes that are left, as U+FFFD if incomplete.
  std::string Finish();

 private:
  // Moves what is complete out of pending_.
  std::string TakeComplete();
  void AppendReplacement(size_t bytes, std::string* out) const;

  const Tokenizer& tokenizer_;
  bool special_;
  bool strip_space_;
  std::string pending_;  // the beginning of a character, at most 3 bytes between calls
};

}  // namespace treadle
