#include "models/text/bpe_tokenizer.h"

#include "base/status.h"

namespace treadle {

BpeTokenizer::BpeTokenizer(TokenizerSpec spec) : Tokenizer(std::move(spec)), added_(spec_.tokens) {
  byte_ids_.fill(-1);
  bytes_.reserve(spec_.tokens.size());
}

absl::Status BpeTokenizer::AddListedMerges(
    const std::unordered_map<std::string_view, int32_t>& ids) {
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

absl::StatusOr<std::vector<int32_t>> BpeTokenizer::Encode(std::string_view text,
                                                          const EncodeOptions& options) const {
  TREADLE_RETURN_IF_ERROR(CheckText(text));
  std::vector<int32_t> ids;
  if (options.add_special && spec_.add_bos) ids.push_back(spec_.bos);
  Merger merger(merges_);
  for (const AddedTokens::Fragment& fragment : added_.Split(text, options.parse_special)) {
    if (fragment.id >= 0) {
      ids.push_back(fragment.id);
    } else {
      TREADLE_RETURN_IF_ERROR(EncodeText(fragment.text, fragment.at_start, &merger, &ids));
    }
  }
  if (options.add_special && spec_.add_eos) ids.push_back(spec_.eos);
  return ids;
}

std::string BpeTokenizer::TokenBytes(int32_t id, bool special) const {
  if (!Emits(id, special)) return "";
  return bytes_[static_cast<size_t>(id)];
}

}  // namespace treadle
