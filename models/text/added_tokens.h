// Finds special and added tokens in a text, before any other tokenization sees it.
//
// Leftmost match, longest there. Time is linear in the text (times the longest added token). Thread
// safety: constant after construction.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "models/text/tokenizer_spec.h"

namespace treadle {

class AddedTokens {
 public:
  // Control and unknown tokens are found only when a call asks for it, user-defined ones always.
  explicit AddedTokens(const std::vector<TokenizerSpec::Token>& tokens);

  // A stretch of the text: an added token's id, or -1 and the text between two of them (not empty).
  struct Fragment {
    int32_t id = -1;
    std::string_view text;
    bool at_start = false;  // begins where the whole text begins
  };
  std::vector<Fragment> Split(std::string_view text, bool parse_special) const;

 private:
  struct Node {
    int32_t special = -1;       // id of the control token that ends here
    int32_t user_defined = -1;  // id of the user-defined token that ends here
  };
  struct Match {
    int32_t id = -1;
    size_t length = 0;
  };
  void Insert(std::string_view text, int32_t id, bool special);
  Match Longest(std::string_view text, bool parse_special) const;

  const std::vector<TokenizerSpec::Token>& tokens_;
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, uint32_t> children_;  // node * 256 + byte -> node
};

}  // namespace treadle
