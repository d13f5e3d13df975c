// Cuts a text into the words inside which byte-level BPE merges.
//
// Patterns are applied one after the other. Each match of a pattern is a piece, and so is the text
// between two matches. Thread safety: constant; Split may be called from any thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace treadle {

// A name that GGUF files have ("tokenizer.ggml.pre"), and what it stands for.
struct PreTokenizerRow {
  std::string_view name;
  std::string_view splits;     // the name of the row that the patterns are named after
  bool nfc = false;            // the authors normalize the text to form C before anything else
  bool ignore_merges = false;  // whole-vocabulary words are taken as they are
  bool add_bos = false;        // unless the file says otherwise
};
std::span<const PreTokenizerRow> PreTokenizerRows();

// Unimplemented, with the nearest known names, for any other `name`.
absl::StatusOr<const PreTokenizerRow*> FindPreTokenizer(std::string_view name);

// A row's patterns as tokenizer.json spells them; kGpt2Pattern is what ByteLevel cuts by.
std::vector<std::string> SplitPatterns(const PreTokenizerRow& row);
inline constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// The same matches of valid UTF-8, for PCRE2 and in linear time; but for the spelling of \s.
const char* OwnPattern(const std::string& pattern);
// The row with these patterns whose flags are nearest; nullptr if none has them.
const PreTokenizerRow* PreTokenizerOf(const std::vector<std::string>& patterns, bool nfc,
                                      bool ignore_merges);

class PreTokenizer {
 public:
  // As FindPreTokenizer.
  static absl::StatusOr<PreTokenizer> Create(std::string_view name);

  // Appends views into `text`, which must be valid UTF-8, in order and without gaps. A view may end
  // inside a character (Falcon's).
  absl::Status Split(std::string_view text, std::vector<std::string_view>* words) const;

  bool normalizes_nfc() const { return nfc_; }

 private:
  struct Pattern;
  PreTokenizer() = default;

  std::vector<std::shared_ptr<const Pattern>> patterns_;
  bool nfc_ = false;
  bool digit_bytes_ = false;
};

}  // namespace treadle
