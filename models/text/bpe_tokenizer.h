// What both kinds of byte pair encoding share: added tokens are found first, merges join the
// symbols of the text between them, and every token stands for some bytes.
//
// Thread safety: as Tokenizer.
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

class BpeTokenizer : public Tokenizer {
 public:
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const final;
  std::string TokenBytes(int32_t id, bool special) const final;

 protected:
  explicit BpeTokenizer(TokenizerSpec spec);

  // Appends the ids of a text between added tokens; `at_start`: the whole text begins with it.
  virtual absl::Status EncodeText(std::string_view text, bool at_start, Merger* merger,
                                  std::vector<int32_t>* ids) const = 0;
  // The checkpoint's merges, in their order; `ids` of what may be merged, by text. InvalidArgument
  // if a merge names a token that is not there.
  absl::Status AddListedMerges(const std::unordered_map<std::string_view, int32_t>& ids);

  AddedTokens added_;
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_;  // -1: no token
  std::vector<std::string> bytes_;     // by id
};

// InvalidArgument if a merge names a token that the vocabulary lacks; Unimplemented for an unknown
// pre-tokenizer.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateByteLevelBpe(TokenizerSpec spec);
// InvalidArgument if a merge names a token that the vocabulary lacks, or if text could meet a
// character that neither bytes nor an unknown token cover.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceBpe(TokenizerSpec spec);

}  // namespace treadle
