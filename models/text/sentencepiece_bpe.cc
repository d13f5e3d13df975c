// SentencePiece's BPE model (Kudo and Richardson 2018) with byte fallback.
//
// Spaces are written U+2581, the characters are the first symbols, and merges join them: ranked
// pairs where the checkpoint lists them, else any pair whose text is in the vocabulary, best score
// first. A character that no token spells becomes its bytes' tokens, or else the unknown token, one
// for a run. Added tokens are found in the text before spaces are rewritten.
#include <algorithm>
#include <charconv>

#include "base/status.h"
#include "models/text/bpe_tokenizer.h"
#include "models/text/unicode.h"

namespace treadle {
namespace {

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581

// 0 to 255 for "<0xNN>", else -1.
int ByteOf(std::string_view text) {
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  int value = -1;
  const auto [end, error] = std::from_chars(text.data() + 3, text.data() + 5, value, 16);
  return error == std::errc() && end == text.data() + 5 ? value : -1;
}

std::string SpacesOf(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at).starts_with(kSpace)) {
      out.push_back(' ');
      at += kSpace.size();
    } else {
      out.push_back(text[at++]);
    }
  }
  return out;
}

class SentencePieceBpe final : public BpeTokenizer {
 public:
  explicit SentencePieceBpe(TokenizerSpec spec) : BpeTokenizer(std::move(spec)) {
    for (size_t id = 0; id < spec_.tokens.size(); ++id) {
      const TokenizerSpec::Token& token = spec_.tokens[id];
      const int byte = token.kind == TokenKind::kByte ? ByteOf(token.text) : -1;
      if (byte >= 0) {
        byte_ids_[static_cast<size_t>(byte)] = static_cast<int32_t>(id);
        bytes_.emplace_back(1, static_cast<char>(byte));
        continue;
      }
      bytes_.push_back(SpacesOf(token.normalized ? Normalized(token.text) : token.text));
      const bool user_defined = token.kind == TokenKind::kUserDefined && !token.outside_model;
      if (token.kind == TokenKind::kNormal || user_defined) {
        ids_.try_emplace(token.text, static_cast<int32_t>(id));
      }
    }
    byte_fallback_ = std::ranges::all_of(byte_ids_, [](int32_t id) { return id >= 0; });
  }

  absl::Status AddMerges() {
    FindAddedTokens();
    if (!byte_fallback_ && spec_.unknown < 0) {
      return InvalidArgument(
          "tokenizer: the vocabulary has neither 256 byte tokens nor an unknown token");
    }
    if (!spec_.merges.empty()) return AddListedMerges(ids_);
    return AddScoredMerges();
  }

 private:
  absl::Status AddScoredMerges();
  int32_t FindId(std::string_view text) const {  // -1 if absent
    const auto found = ids_.find(text);
    return found == ids_.end() ? -1 : found->second;
  }
  std::string Normalized(std::string_view text) const override;
  absl::Status EncodeText(std::string_view text, bool at_start, Merger* merger,
                          std::vector<int32_t>* ids) const override;
  void EmitCharacter(char32_t character, std::vector<int32_t>* ids) const;

  std::unordered_map<std::string_view, int32_t> ids_;  // of mergeable tokens, by text
  bool byte_fallback_ = false;                         // every byte has its token
};

// Every way to cut a token into two tokens is a merge; tokens of one score share a priority. All
// cuts of a token read the square of its length.
absl::Status SentencePieceBpe::AddScoredMerges() {
  constexpr size_t kMaxRead = size_t{1} << 30;  // a second; real vocabularies: some 10^7
  size_t read = 0;
  std::vector<int32_t> order;
  for (const auto& [text, id] : ids_) order.push_back(id);
  const auto score = [this](int32_t id) { return spec_.tokens[static_cast<size_t>(id)].score; };
  std::ranges::sort(order, [&](int32_t a, int32_t b) { return score(a) > score(b); });
  int32_t priority = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const int32_t id = order[i];
    if (i > 0 && score(order[i - 1]) != score(id)) ++priority;
    const std::string_view text = spec_.tokens[static_cast<size_t>(id)].text;
    read += text.size() * text.size();
    if (read > kMaxRead) {
      return InvalidArgument("tokenizer: its tokens are too long together: the squares of their ",
                             "lengths add up to more than ", kMaxRead, " at token ", id, " of ",
                             text.size(), " bytes");
    }
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const int32_t left = FindId(text.substr(0, cut));
      if (left < 0) continue;
      const int32_t right = FindId(text.substr(cut));
      if (right >= 0) merges_.Add(left, right, {priority, id});
    }
  }
  return absl::OkStatus();
}

// The dummy space, unless that is for the words to have, and spaces as the vocabulary spells them.
std::string SentencePieceBpe::Normalized(std::string_view text) const {
  std::string out;
  if (spec_.space_prefix_if_missing) return std::string(text);
  if (spec_.add_space_prefix && !text.empty()) out = kSpace;
  for (const char c : text) {
    if (c == ' ') {
      out += kSpace;
    } else {
      out.push_back(c);
    }
  }
  return out;
}

absl::Status SentencePieceBpe::EncodeText(std::string_view text, bool at_start, Merger* merger,
                                          std::vector<int32_t>* ids) const {
  std::vector<int32_t> symbols;  // a character without a token is -1 - character
  symbols.reserve(text.size() + 1);
  const int32_t space = FindId(kSpace);
  const int32_t space_symbol = space >= 0 ? space : -1 - 0x2581;
  const bool begins_with_space = text.starts_with(' ') || text.starts_with(kSpace);
  if (spec_.add_space_prefix && spec_.space_prefix_if_missing && !begins_with_space &&
      (at_start || !spec_.space_prefix_at_start_only)) {
    symbols.push_back(space_symbol);
  }
  for (size_t at = 0; at < text.size();) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    const int32_t id = FindId(text.substr(at, front.length));
    if (front.character == ' ') {
      symbols.push_back(space_symbol);
    } else {
      symbols.push_back(id >= 0 ? id : -1 - static_cast<int32_t>(front.character));
    }
    at += front.length;
  }
  merger->Run(&symbols);
  bool after_unknown = false;
  for (int32_t symbol : symbols) {
    const bool unknown = symbol < 0 && !byte_fallback_;
    if (symbol >= 0) {
      ids->push_back(symbol);
    } else if (byte_fallback_) {
      EmitCharacter(static_cast<char32_t>(-1 - symbol), ids);
    } else if (!after_unknown) {
      ids->push_back(spec_.unknown);
    }
    after_unknown = unknown;
  }
  return absl::OkStatus();
}

void SentencePieceBpe::EmitCharacter(char32_t character, std::vector<int32_t>* ids) const {
  std::string bytes;
  AppendUtf8(character, &bytes);
  for (char byte : bytes) ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceBpe(TokenizerSpec spec) {
  auto made = std::make_unique<SentencePieceBpe>(std::move(spec));
  TREADLE_RETURN_IF_ERROR(made->AddMerges());
  return made;
}

}  // namespace treadle
