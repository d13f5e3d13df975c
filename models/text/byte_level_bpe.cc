// Byte-level byte pair encoding (Radford et al. 2019, section 2.2): text is cut into words, the
// bytes of a word are the first symbols, and the model's ranked merges join them.
//
// A byte that the vocabulary has no token for is left out, as the authors' tokenizers do.
#include "base/status.h"
#include "models/text/bpe_tokenizer.h"
#include "models/text/pre_tokenizer.h"
#include "models/text/unicode.h"

namespace treadle {
namespace {

// GPT-2 writes each byte as a printable character: itself where it is one, else the next of
// U+0100...
struct ByteSpelling {
  std::array<char32_t, 256> character;
  std::unordered_map<char32_t, uint8_t> byte;
};

const ByteSpelling& Spelling() {
  static const ByteSpelling spelling = [] {
    ByteSpelling made;
    char32_t next = 0x100;
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      made.character[b] = printable ? b : next++;
      made.byte[made.character[b]] = static_cast<uint8_t>(b);
    }
    return made;
  }();
  return spelling;
}

// The bytes that a token's text stands for; a text outside the spelling stands for itself.
std::string BytesOf(std::string_view text) {
  std::string bytes;
  for (size_t at = 0; at < text.size();) {
    const Utf8Front front = ReadUtf8(text.substr(at));
    const auto byte = Spelling().byte.find(front.character);
    if (front.kind != Utf8Front::Kind::kCharacter || byte == Spelling().byte.end()) {
      return std::string(text);
    }
    bytes.push_back(static_cast<char>(byte->second));
    at += front.length;
  }
  return bytes;
}

class ByteLevelBpe final : public BpeTokenizer {
 public:
  ByteLevelBpe(TokenizerSpec spec, PreTokenizer pre_tokenizer)
      : BpeTokenizer(std::move(spec)), pre_tokenizer_(std::move(pre_tokenizer)) {
    for (size_t id = 0; id < spec_.tokens.size(); ++id) {
      const TokenizerSpec::Token& token = spec_.tokens[id];
      const bool normal = token.kind == TokenKind::kNormal;
      bytes_.push_back(BytesOf(token.normalized ? Normalized(token.text) : token.text));
      const std::string& bytes = bytes_.back();
      if (normal && bytes.size() == 1) {
        int32_t& slot = byte_ids_[static_cast<uint8_t>(bytes[0])];
        if (slot < 0) slot = static_cast<int32_t>(id);
      }
      if (normal && spec_.ignore_merges) word_ids_.try_emplace(bytes, static_cast<int32_t>(id));
    }
  }

  absl::Status AddMerges() {
    FindAddedTokens();
    std::unordered_map<std::string_view, int32_t> ids;
    ids.reserve(spec_.tokens.size());
    for (size_t id = 0; id < spec_.tokens.size(); ++id) {
      ids.try_emplace(spec_.tokens[id].text, static_cast<int32_t>(id));
    }
    return AddListedMerges(ids);
  }

 private:
  std::string Normalized(std::string_view text) const override {
    return pre_tokenizer_.normalizes_nfc() ? NormalizeNfc(text) : std::string(text);
  }
  absl::Status EncodeText(std::string_view text, bool at_start, Merger* merger,
                          std::vector<int32_t>* ids) const override;

  const PreTokenizer pre_tokenizer_;
  std::unordered_map<std::string, int32_t> word_ids_;  // by bytes; only filled for ignore_merges
};

absl::Status ByteLevelBpe::EncodeText(std::string_view text, bool /*at_start*/, Merger* merger,
                                      std::vector<int32_t>* ids) const {
  std::vector<std::string_view> words;
  TREADLE_RETURN_IF_ERROR(pre_tokenizer_.Split(text, &words));
  std::vector<int32_t> symbols;
  for (std::string_view word : words) {
    if (spec_.ignore_merges) {
      const auto whole = word_ids_.find(std::string(word));
      if (whole != word_ids_.end()) {
        ids->push_back(whole->second);
        continue;
      }
    }
    symbols.clear();
    for (char c : word) {
      const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
      if (id >= 0) symbols.push_back(id);
    }
    merger->Run(&symbols);
    ids->insert(ids->end(), symbols.begin(), symbols.end());
  }
  return absl::OkStatus();
}

}  // namespace

std::string SpelledBytes(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) AppendUtf8(Spelling().character[static_cast<uint8_t>(c)], &text);
  return text;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> CreateByteLevelBpe(TokenizerSpec spec) {
  TREADLE_ASSIGN_OR_RETURN(PreTokenizer pre_tokenizer, PreTokenizer::Create(spec.pre_tokenizer));
  auto made = std::make_unique<ByteLevelBpe>(std::move(spec), std::move(pre_tokenizer));
  TREADLE_RETURN_IF_ERROR(made->AddMerges());
  return made;
}

}  // namespace treadle
