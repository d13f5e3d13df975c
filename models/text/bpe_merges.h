// The merge loop of byte pair encoding (Sennrich et al. 2016, section 3.2), shared by both models.
//
// Adjacent symbols whose pair has the lowest priority value are merged first, leftmost first among
// equals, until no pair of the table is left. O(n log n) for n symbols. Thread safety: a table is
// constant once filled; a Merger belongs to one thread.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace treadle {

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

class Merger {
 public:
  explicit Merger(const MergeTable& table) : table_(table) {}
  // Merges `symbols` in place. Each is a token id, or negative for what no merge may touch.
  void Run(std::vector<int32_t>* symbols);

 private:
  struct Candidate {
    int32_t priority;
    int32_t position;  // of the left symbol
    int32_t left;      // both symbols as they were: a candidate whose symbols changed is stale
    int32_t right;
    bool operator>(const Candidate& other) const {
      return priority != other.priority ? priority > other.priority : position > other.position;
    }
  };
  void Consider(const std::vector<int32_t>& symbols, int32_t left, int32_t right);

  const MergeTable& table_;
  std::vector<int32_t> previous_;
  std::vector<int32_t> next_;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue_;
};

}  // namespace treadle
