#include "models/text/bpe_merges.h"

namespace treadle {
namespace {
// A symbol that was merged into its left neighbour.
constexpr int32_t kMergedAway = INT32_MIN;
}  // namespace

void Merger::Consider(const std::vector<int32_t>& symbols, int32_t left, int32_t right) {
  const int32_t left_id = symbols[static_cast<size_t>(left)];
  const int32_t right_id = symbols[static_cast<size_t>(right)];
  if (const MergeTable::Merge* merge = table_.Find(left_id, right_id)) {
    queue_.push({merge->priority, left, left_id, right_id});
  }
}

void Merger::Run(std::vector<int32_t>* symbols) {
  std::vector<int32_t>& ids = *symbols;
  const auto count = static_cast<int32_t>(ids.size());
  previous_.resize(ids.size());
  next_.resize(ids.size());
  for (int32_t i = 0; i < count; ++i) {
    previous_[static_cast<size_t>(i)] = i - 1;
    next_[static_cast<size_t>(i)] = i + 1;
    if (i + 1 < count) Consider(ids, i, i + 1);
  }
  while (!queue_.empty()) {
    const Candidate best = queue_.top();
    queue_.pop();
    const auto left = static_cast<size_t>(best.position);
    const int32_t right = next_[left];
    if (ids[left] != best.left || right >= count || ids[static_cast<size_t>(right)] != best.right) {
      continue;
    }
    ids[left] = table_.Find(best.left, best.right)->result;
    ids[static_cast<size_t>(right)] = kMergedAway;
    const int32_t after = next_[static_cast<size_t>(right)];
    next_[left] = after;
    if (after < count) {
      previous_[static_cast<size_t>(after)] = best.position;
      Consider(ids, best.position, after);
    }
    if (previous_[left] >= 0) Consider(ids, previous_[left], best.position);
  }
  std::erase(ids, kMergedAway);
}

}  // namespace treadle
