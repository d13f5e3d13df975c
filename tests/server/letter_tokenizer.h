// A tokenizer for tests: every id stands for one to three letters, so text has many stop strings to
// find and no invalid bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "models/text/tokenizer.h"

namespace treadle {

class LetterTokenizer final : public Tokenizer {
 public:
  static std::unique_ptr<Tokenizer> Make(int32_t vocab) {
    TokenizerSpec spec;
    for (int32_t id = 0; id < vocab; ++id) spec.tokens.push_back({Text(id), 0, TokenKind::kNormal});
    spec.eos = vocab - 1;
    spec.end_ids = {vocab - 1};
    return std::make_unique<LetterTokenizer>(std::move(spec));
  }
  explicit LetterTokenizer(TokenizerSpec spec) : Tokenizer(std::move(spec)) {}

  // Letters by letters: 'a' is id 0, 'b' id 1 ...
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions&) const override {
    std::vector<int32_t> ids;
    for (char c : text) {
      if (c < 'a' || c > 'z') return InvalidArgument("'", c, "' is no letter, expected a to z");
      ids.push_back(c - 'a');
    }
    return ids;
  }
  std::string TokenBytes(int32_t id, bool) const override {
    return id >= 0 && id < size() ? spec().tokens[id].text : "";
  }

 private:
  static std::string Text(int32_t id) {
    return std::string(1 + id / 26, static_cast<char>('a' + id % 26));
  }
};

}  // namespace treadle
