#include "models/text/added_tokens.h"

#include "models/text/unicode.h"

namespace treadle {
namespace {

size_t LeadingSpace(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    if (!IsWhiteSpace(front.character)) break;
    at += front.length;
  }
  return at;
}

size_t TrailingSpace(std::string_view text) {
  size_t end = text.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
    if (!IsWhiteSpace(ReadUtf8(text.substr(start, end - start)).character)) break;
    end = start;
  }
  return text.size() - end;
}

}  // namespace

AddedTokens::AddedTokens(const std::vector<TokenizerSpec::Token>& tokens)
    : tokens_(tokens), nodes_(1) {
  for (size_t id = 0; id < tokens.size(); ++id) {
    const TokenKind kind = tokens[id].kind;
    const bool special = kind == TokenKind::kControl || kind == TokenKind::kUnknown;
    if (special || kind == TokenKind::kUserDefined) {
      Insert(tokens[id].text, static_cast<int32_t>(id), special);
    }
  }
}

void AddedTokens::Insert(std::string_view text, int32_t id, bool special) {
  if (text.empty()) return;
  uint32_t node = 0;
  for (char c : text) {
    const uint64_t key = uint64_t{node} * 256 + static_cast<uint8_t>(c);
    const auto [child, inserted] = children_.try_emplace(key, static_cast<uint32_t>(nodes_.size()));
    if (inserted) nodes_.emplace_back();
    node = child->second;
  }
  int32_t& slot = special ? nodes_[node].special : nodes_[node].user_defined;
  if (slot < 0) slot = id;
}

AddedTokens::Match AddedTokens::Longest(std::string_view text, bool parse_special) const {
  Match best;
  uint32_t node = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto child = children_.find(uint64_t{node} * 256 + static_cast<uint8_t>(text[i]));
    if (child == children_.end()) break;
    node = child->second;
    const Node& here = nodes_[node];
    if (parse_special && here.special >= 0) {
      best = {here.special, i + 1};
    } else if (here.user_defined >= 0) {
      best = {here.user_defined, i + 1};
    }
  }
  return best;
}

std::vector<AddedTokens::Fragment> AddedTokens::Split(std::string_view text,
                                                      bool parse_special) const {
  std::vector<Fragment> fragments;
  size_t pending = 0;  // start of the text that no fragment holds yet
  const auto flush = [&](size_t end) {
    if (end > pending) {
      fragments.push_back({-1, text.substr(pending, end - pending), pending == 0});
    }
  };
  size_t at = 0;
  while (at < text.size()) {
    const Match match = Longest(text.substr(at), parse_special);
    if (match.id < 0) {
      ++at;
      continue;
    }
    const TokenizerSpec::Token& token = tokens_[static_cast<size_t>(match.id)];
    size_t end = at + match.length;
    size_t start = at;
    if (token.trim_left) start -= TrailingSpace(text.substr(pending, at - pending));
    if (token.trim_right) end += LeadingSpace(text.substr(end));
    flush(start);
    fragments.push_back({match.id, text.substr(start, end - start), start == 0});
    pending = at = end;
  }
  flush(text.size());
  return fragments;
}

}  // namespace treadle
