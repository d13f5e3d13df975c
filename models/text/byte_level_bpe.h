// Byte-level byte pair encoding (Radford et al. 2019, section 2.2): text is cut into words, the
// bytes of a word are the first symbols, and the model's ranked merges join them.
//
// A byte that the vocabulary has no token for is left out, as the authors' tokenizers do.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "models/text/added_tokens.h"
#include "models/text/bpe_merges.h"
#include "models/text/pre_tokenizer.h"
#include "models/text/tokenizer.h"

namespace treadle {

class ByteLevelBpe final : public Tokenizer {
 public:
  // InvalidArgument if a merge names a token that the vocabulary lacks; Unimplemented for an
  // unknown pre-tokenizer.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(TokenizerSpec spec);

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override;
  std::string TokenBytes(int32_t id, bool special) const override;

 private:
  explicit ByteLevelBpe(TokenizerSpec spec);
  absl::Status AddMerges();
  absl::Status EncodeText(std::string_view text, Merger* merger, std::vector<int32_t>* ids) const;

  AddedTokens added_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_;                  // -1: no token
  std::unordered_map<std::string, int32_t> word_ids_;  // by bytes; only filled for ignore_merges
  std::vector<std::string> bytes_;                     // by id
};

}  // namespace treadle
