// Shared by both kinds of byte pair encoding: added tokens are found first, merges join the
// symbols of the text between them, and every token stands for some bytes.
//
// Thread safety: as Tokenizer.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "models/text/tokenizer.h"

namespace treadle {

// Finds special and added tokens in a text, before any other tokenization sees it: leftmost match,
// longest there, as the tokenizers library's AddedVocabulary does. Time is linear in the text
// (times the longest added token). Thread safety: constant after construction.
class AddedTokens {
 public:
  // For `tokens`, which must outlive this, of one value of `normalized`. Control and unknown tokens
  // are found only when a call asks for it, user-defined ones always.
  AddedTokens(const std::vector<TokenizerSpec::Token>& tokens, bool normalized)
      : tokens_(tokens), normalized_(normalized), nodes_(1) {}
  // `spell`: how a token's text stands in a text that is searched.
  void InsertAll(const std::function<std::string(std::string_view)>& spell);

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
  const bool normalized_;
  std::vector<Node> nodes_;
  std::unordered_map<uint64_t, uint32_t> children_;  // node * 256 + byte -> node
};

// The merge loop of byte pair encoding (Sennrich et al. 2016, section 3.2). Adjacent symbols whose
// pair has the lowest priority value are merged first, leftmost first among equals, until no pair
// of the table is left. O(n log n) for n symbols. Thread safety: a table is constant once filled; a
// Merger belongs to one thread.
class MergeTable {
 public:
  struct Merge {
    int32_t priority = 0;
    int32_t result = -1;
  };
  void Reserve(size_t merges) { merges_.reserve(merges); }
  // The first entry for a pair stays.
  void Add(int32_t left, int32_t right, Merge merge) {
    merges_.try_emplace(Key(left, right), merge);
  }
  // nullptr if the two do not merge. Negative symbols never do.
  const Merge* Find(int32_t left, int32_t right) const {
    if (left < 0 || right < 0) return nullptr;
    const auto found = merges_.find(Key(left, right));
    return found == merges_.end() ? nullptr : &found->second;
  }

 private:
  static uint64_t Key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  absl::flat_hash_map<uint64_t, Merge> merges_;
};

// Pairs that may be merged: by priority, and where that is the same, from the left.
class MergeQueue {
 public:
  // Stale if the pair at that position has another priority by now, or is none.
  struct Candidate {
    int32_t priority;
    int32_t position;  // of the left symbol
    auto operator<=>(const Candidate&) const = default;
  };

  // For a word of so many symbols; empty.
  void Begin(size_t symbols) { long_ = symbols > kLong; }
  bool empty() const { return long_ ? priorities_.empty() : heap_.empty(); }
  void Push(const Candidate& candidate);
  Candidate Pop();

 private:
  // A word is a few symbols, and a heap of them the quickest. One of millions (a text of one
  // letter) would have a heap of millions; but it has few priorities, and comes in order of
  // position. So each priority has a list, in order, and a heap for what comes once that is being
  // read.
  static constexpr size_t kLong = 1024;
  template <typename T>
  using Heap = std::priority_queue<T, std::vector<T>, std::greater<>>;
  struct Bucket {
    std::vector<int32_t> listed;  // positions
    size_t next = 0;
    bool begun = false;
    Heap<int32_t> late;

    bool empty() const { return next == listed.size() && late.empty(); }
  };

  bool long_ = false;
  Heap<Candidate> heap_;
  Bucket& At(int32_t priority);

  std::unordered_map<int32_t, Bucket> buckets_;
  struct Known {
    int32_t priority = 0;
    Bucket* bucket = nullptr;  // null: none, or gone
  };
  std::array<Known, 16> known_;  // that At gave lately, by priority
  Heap<int32_t> priorities_;     // of the buckets that are not empty
};

class Merger {
 public:
  explicit Merger(const MergeTable& table) : table_(table) {}
  // Merges `symbols` in place. Each is a token id, or negative for what no merge may touch.
  void Run(std::vector<int32_t>* symbols);

 private:
  // As the table's, by way of what was found lately: text repeats its pairs.
  const MergeTable::Merge* Find(int32_t left, int32_t right);
  void Consider(const std::vector<int32_t>& symbols, int32_t left, int32_t right);

  struct Found {
    int32_t left = -1;  // none yet: a pair that is not looked up
    int32_t right = -1;
    const MergeTable::Merge* merge = nullptr;
  };

  const MergeTable& table_;
  std::array<Found, 256> found_;  // by the pair's hash
  std::vector<int32_t> previous_;
  std::vector<int32_t> next_;
  MergeQueue queue_;
};

class BpeTokenizer : public Tokenizer {
 public:
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                              const EncodeOptions& options) const final;
  std::string TokenBytes(int32_t id, bool special) const final;

 protected:
  explicit BpeTokenizer(TokenizerSpec spec);

  // The form that the authors give a text, or a part between added tokens, before they look for
  // those tokens that are normalized.
  virtual std::string Normalized(std::string_view text) const = 0;
  // Once a subclass can normalize.
  void FindAddedTokens();
  // Appends the ids of such a text between added tokens; `at_start`: the whole text begins with it.
  virtual absl::Status EncodeText(std::string_view text, bool at_start, Merger* merger,
                                  std::vector<int32_t>* ids) const = 0;
  // The checkpoint's merges, in their order; `ids` of what may be merged, by text. InvalidArgument
  // if a merge names a token that is not there.
  absl::Status AddListedMerges(const std::unordered_map<std::string_view, int32_t>& ids);

  AddedTokens added_;             // found in the text as it is
  AddedTokens normalized_added_;  // found in what is left of it, normalized
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_;  // -1: no token
  std::vector<std::string> bytes_;     // by id
};

// A token's text in byte-level vocabularies (TokenizerSpec::Token::text).
std::string SpelledBytes(std::string_view bytes);

// InvalidArgument if a merge names a token that the vocabulary lacks; Unimplemented for an unknown
// pre-tokenizer.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateByteLevelBpe(TokenizerSpec spec);
// InvalidArgument if a merge names a token that the vocabulary lacks, or if text could meet a
// character that neither bytes nor an unknown token cover.
absl::StatusOr<std::unique_ptr<Tokenizer>> CreateSentencePieceBpe(TokenizerSpec spec);

}  // namespace treadle
