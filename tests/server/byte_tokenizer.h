// A tokenizer for tests: id = byte value, 0 to 255; 256 begins, 257 ends a text. Every cut through
// a character or a stop string can be made at will.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/text/tokenizer.h"

namespace treadle {

class ByteTokenizer final : public Tokenizer {
 public:
  static constexpr int32_t kBegin = 256;
  static constexpr int32_t kEnd = 257;

  static std::unique_ptr<Tokenizer> Make() { return std::make_unique<ByteTokenizer>(Spec()); }
  explicit ByteTokenizer(TokenizerSpec spec) : Tokenizer(std::move(spec)) {}

  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const override {
    std::vector<int32_t> ids;
    if (options.add_special) ids.push_back(kBegin);
    for (unsigned char c : text) ids.push_back(c);
    return ids;
  }
  std::string TokenBytes(int32_t id, bool special) const override {
    if (id >= 0 && id < 256) return std::string(1, static_cast<char>(id));
    return special && id < size() ? spec().tokens[id].text : "";
  }

 private:
  static TokenizerSpec Spec() {
    TokenizerSpec spec;
    for (int i = 0; i < 256; ++i) {
      spec.tokens.push_back({std::string(1, static_cast<char>(i)), 0, TokenKind::kNormal});
    }
    spec.tokens.push_back({"<s>", 0, TokenKind::kControl});
    spec.tokens.push_back({"</s>", 0, TokenKind::kControl});
    spec.bos = kBegin;
    spec.eos = kEnd;
    spec.end_ids = {kEnd};
    return spec;
  }
};

}  // namespace treadle
