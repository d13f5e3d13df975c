// One sequence on a stage: its start, the token ids by position, and what follows from them.
//
// A token is entered when it is an input of a step, never when it is sampled: ids() therefore names
// exactly the positions whose K/V are in the cache. Counts for penalties are kept in step with the
// ids, and only when the sampling parameters ask for them.
//
// Invariants: 1. ids().size() == next_position() <= capacity(). 2. counts() is ascending by token,
// without zero entries, and equals the tally of ids(). 3. The previous sample, if there is one,
// belongs at next_position().
// Thread safety: confined to the rank's thread. After construction nothing here allocates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/iteration_plan.h"

namespace treadle {

class LiveSequence {
 public:
  // `start` was checked (see SequenceTable::Check). Positions before its first one have the ids of
  // start.earlier_tokens, or -1 where it carries none.
  LiveSequence(const SequenceStart& start, int64_t page_size);

  const SequenceStart& start() const { return start_; }
  int64_t capacity() const { return capacity_; }  // positions that its pages hold
  int64_t next_position() const { return static_cast<int64_t>(ids_.size()); }
  std::span<const int32_t> ids() const { return ids_; }  // [next_position()]
  std::span<const TokenCount> counts() const { return counts_; }
  // -1: none. Below: the host has not seen it yet (Backend::Embed says what the number means).
  int32_t previous_sample() const { return previous_sample_; }
  bool counting() const { return counting_; }  // its sampling needs counts()

  // Enters ids at first_position and on, after discarding what lay there or later. The previous
  // sample is gone then. Requires start().first_position <= first_position <= next_position().
  void Enter(int64_t first_position, std::span<const int32_t> ids);
  // The token that was sampled for next_position(), or what stands for it until Resolve. Sequences
  // that count never enter such a stand-in.
  void SetSample(int32_t token) { previous_sample_ = token; }
  // The token that was sampled for `position` is known now; it may have been entered meanwhile, or
  // discarded.
  void Resolve(int64_t position, int32_t token);

 private:
  void Count(int32_t token, int64_t position, int32_t change);

  SequenceStart start_;
  int64_t capacity_;
  bool counting_;
  std::vector<int32_t> ids_;
  std::vector<TokenCount> counts_;
  int32_t previous_sample_ = -1;
};

}  // namespace treadle
