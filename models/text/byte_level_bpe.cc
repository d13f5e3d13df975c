#include "models/text/byte_level_bpe.h"

#include "base/status.h"
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

}  // namespace

ByteLevelBpe::ByteLevelBpe(TokenizerSpec spec) : Tokenizer(std::move(spec)), added_(spec_.tokens) {
  byte_ids_.fill(-1);
  bytes_.reserve(spec_.tokens.size());
  for (size_t id = 0; id < spec_.tokens.size(); ++id) {
    const TokenizerSpec::Token& token = spec_.tokens[id];
    const bool normal = token.kind == TokenKind::kNormal;
    bytes_.push_back(normal ? BytesOf(token.text) : token.text);
    const std::string& bytes = bytes_.back();
    if (normal && bytes.size() == 1) {
      int32_t& slot = byte_ids_[static_cast<uint8_t>(bytes[0])];
      if (slot < 0) slot = static_cast<int32_t>(id);
    }
    if (normal && spec_.ignore_merges) word_ids_.try_emplace(bytes, static_cast<int32_t>(id));
  }
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ByteLevelBpe::Create(TokenizerSpec spec) {
  std::unique_ptr<ByteLevelBpe> made(new ByteLevelBpe(std::move(spec)));
  TREADLE_ASSIGN_OR_RETURN(made->pre_tokenizer_, PreTokenizer::Create(made->spec_.pre_tokenizer));
  TREADLE_RETURN_IF_ERROR(made->AddMerges());
  return std::unique_ptr<Tokenizer>(std::move(made));
}

absl::Status ByteLevelBpe::AddMerges() {
  std::unordered_map<std::string_view, int32_t> ids;
  ids.reserve(spec_.tokens.size());
  for (size_t id = 0; id < spec_.tokens.size(); ++id) {
    ids.try_emplace(spec_.tokens[id].text, static_cast<int32_t>(id));
  }
  merges_.Reserve(spec_.merges.size());
  for (size_t rank = 0; rank < spec_.merges.size(); ++rank) {
    const auto& [left, right] = spec_.merges[rank];
    const std::string joined = left + right;
    int32_t found[3];
    const std::string* const texts[] = {&left, &right, &joined};
    for (size_t i = 0; i < 3; ++i) {
      const auto id = ids.find(*texts[i]);
      if (id == ids.end()) {
        return InvalidArgument("tokenizer: merge ", rank, " ('", left, "' and '", right,
                               "') needs the token '", *texts[i], "', which the vocabulary lacks");
      }
      found[i] = id->second;
    }
    merges_.Add(found[0], found[1], {static_cast<int32_t>(rank), found[2]});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> ByteLevelBpe::Encode(std::string_view text,
                                                          const EncodeOptions& options) const {
  TREADLE_RETURN_IF_ERROR(CheckText(text));
  std::vector<int32_t> ids;
  if (options.add_special && spec_.add_bos) ids.push_back(spec_.bos);
  Merger merger(merges_);
  for (const AddedTokens::Fragment& fragment : added_.Split(text, options.parse_special)) {
    if (fragment.id >= 0) {
      ids.push_back(fragment.id);
    } else if (pre_tokenizer_->normalizes_nfc()) {
      TREADLE_RETURN_IF_ERROR(EncodeText(NormalizeNfc(fragment.text), &merger, &ids));
    } else {
      TREADLE_RETURN_IF_ERROR(EncodeText(fragment.text, &merger, &ids));
    }
  }
  if (options.add_special && spec_.add_eos) ids.push_back(spec_.eos);
  return ids;
}

absl::Status ByteLevelBpe::EncodeText(std::string_view text, Merger* merger,
                                      std::vector<int32_t>* ids) const {
  std::vector<std::string_view> words;
  TREADLE_RETURN_IF_ERROR(pre_tokenizer_->Split(text, &words));
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

std::string ByteLevelBpe::TokenBytes(int32_t id, bool special) const {
  if (!Emits(id, special)) return "";
  return bytes_[static_cast<size_t>(id)];
}

}  // namespace treadle
