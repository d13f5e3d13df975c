// SentencePiece's BPE model (Kudo and Richardson 2018) with byte fallback.
//
// Spaces are written U+2581, the characters are the first symbols, and merges join them: ranked
// pairs where the checkpoint lists them, else any pair whose text is in the vocabulary, best score
// first. A character that no token spells becomes its bytes' tokens, or else the unknown token, one
// for a run. Added tokens are found in the text before spaces are rewritten.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "models/text/added_tokens.h"
#include "models/text/bpe_merges.h"
#include "models/text/tokenizer.h"

namespace treadle {

class SentencePieceBpe final : public Tokenizer {
 public:
  // InvalidArgument if a merge names a token that the vocabulary lacks, or if text could meet a
  // character that neither bytes nor an unknown token cover.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(TokenizerSpec spec);

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override;
  std::string TokenBytes(int32_t id, bool special) const override;

 private:
  explicit SentencePieceBpe(TokenizerSpec spec);
  absl::Status AddListedMerges();
  void AddScoredMerges();
  int32_t FindId(std::string_view text) const;  // -1 if absent
  void EncodeText(std::string_view text, bool at_start, Merger* merger,
                  std::vector<int32_t>* ids) const;
  void EmitCharacter(char32_t character, std::vector<int32_t>* ids) const;

  AddedTokens added_;
  std::unordered_map<std::string_view, int32_t> ids_;  // of mergeable tokens, by text
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_;  // -1: no token
  bool byte_fallback_ = false;         // every byte has its token
  std::vector<std::string> bytes_;     // by id
};

}  // namespace treadle
