// Cuts a text into the words inside which byte-level BPE merges.
//
// A pre-tokenizer is a row of a table: a name as GGUF spells it, and patterns applied one after the
// other. Each match of a pattern is a piece, and so is the text between two matches. Thread safety:
// constant; Split may be called from any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

class PreTokenizer {
 public:
  // Unimplemented, with the known names, for any other `name`.
  static absl::StatusOr<PreTokenizer> Create(std::string_view name);

  // Appends views into `text`, which must be valid UTF-8, in order and without gaps. A view may end
  // inside a character (Falcon's).
  absl::Status Split(std::string_view text, std::vector<std::string_view>* words) const;

  // The authors normalize the text to form C before anything else.
  bool normalizes_nfc() const { return nfc_; }

 private:
  struct Pattern;
  PreTokenizer() = default;

  std::vector<std::shared_ptr<const Pattern>> patterns_;
  bool nfc_ = false;
  bool digit_bytes_ = false;
};

// The name whose authors' tokenizer.json spells its splitting pattern `pattern`; "" if none does.
std::string_view PreTokenizerOfPattern(std::string_view pattern);
// The inverse; "" for a name without such a pattern.
std::string_view PatternOfPreTokenizer(std::string_view name);

}  // namespace treadle
