// The live sequences of a stage, and the check that a plan must pass before anything is touched.
//
// A sequence is made by its start and dropped by its release. Plans come from another room and,
// with worker processes, from another machine: whatever a plan says that would reach outside the
// cache, the vocabulary or the batch buffers is an error that names it, not a crash.
//
// Thread safety: confined to the rank's thread. Check and At do not allocate in the steady state
// (plans without starts).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/iteration_plan.h"

namespace treadle {

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
class LiveSequence {
 public:
  // `start` was checked (see SequenceTable::Check). Positions before its first one have the ids of
  // start.earlier_tokens, or -1 where it carries none.
  LiveSequence(const SequenceStart& start, int64_t page_size);

  const SequenceStart& start() const { return start_; }
  int64_t capacity() const { return capacity_; }  // positions that its tables name pages for
  // The end of what was ever written; later steps may have gone back.
  int64_t written() const { return written_; }
  int64_t next_position() const { return static_cast<int64_t>(ids_.size()); }
  std::span<const int32_t> ids() const { return ids_; }  // [next_position()]
  std::span<const TokenCount> counts() const { return counts_; }
  // -1: none. Below: the host has not seen it yet (Backend::Embed says what the number means).
  int32_t previous_sample() const { return previous_sample_; }
  bool counting() const { return counting_; }  // its sampling needs counts()
  // For whoever pools its final hidden states.
  std::vector<float>& pooled() { return pooled_; }

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
  int64_t written_;
  bool counting_;
  std::vector<int32_t> ids_;
  std::vector<TokenCount> counts_;
  int32_t previous_sample_ = -1;
  std::vector<float> pooled_;
};

class SequenceTable {
 public:
  struct Limits {
    int64_t page_size = 0;
    PageCounts num_pages;
    int64_t window = 0;  // positions that local layers see
    int64_t vocab = 0;
    int64_t context = 0;  // positions that the model can run
    int64_t max_batch_tokens = 0;
  };

  explicit SequenceTable(const Limits& limits) : limits_(limits) {}

  // Ok if the plan can be applied to the table as it is: releases name live sequences; starts name
  // new ones; page ids, token ids and positions are in range and within the sequence's pages, of
  // which the window's are a ring that holds all that a step writes and looks back at; each
  // sequence has at most one step, which begins at or before its next position; a step without
  // tokens has a previous sample to run; the steps fit into max_batch_tokens, unless no stage runs
  // them. NotFound for an unknown sequence, InvalidArgument otherwise. Changes nothing.
  absl::Status Check(const IterationPlan& plan);

  // Require a plan that was checked.
  void Release(SequenceId sequence);
  void Start(const SequenceStart& start);
  LiveSequence& At(SequenceId sequence);
  LiveSequence* Find(SequenceId sequence);  // null: not live

  size_t size() const { return live_.size(); }
  void Clear() { live_.clear(); }

 private:
  // What the check of a plan notes about a sequence. A note counts only while its `check` is that
  // of the current check, so nothing needs to be wiped.
  struct Entry {
    LiveSequence sequence;
    uint64_t released_in = 0;
    uint64_t stepped_in = 0;
  };
  struct Starting {
    const SequenceStart* start;
    bool stepped;
  };
  // Where a step of the plan would find its sequence.
  struct Target {
    const SequenceStart* start;
    int64_t next_position;
    int64_t written;
    int32_t previous_sample;
    bool stepped;
  };

  absl::Status CheckRelease(SequenceId sequence);
  absl::Status CheckStart(const SequenceStart& start);
  absl::Status CheckPages(const SequenceStart& start) const;
  absl::Status CheckStep(const Step& step);
  absl::Status CheckRing(const Step& step, const Target& target) const;
  absl::Status CheckPooling(const Step& step, const Target& target) const;
  absl::Status CheckStepTokens(const Step& step, const Target& target) const;
  absl::Status CheckSampling(const SamplingParameters& sampling, SequenceId id) const;
  absl::Status CheckPage(int32_t page, PageKind kind, const char* what, uint64_t id) const;
  absl::Status CheckToken(int32_t token, const char* what, uint64_t id) const;
  absl::StatusOr<Target> FindTarget(SequenceId sequence);

  const Limits limits_;
  std::unordered_map<SequenceId, Entry> live_;
  uint64_t check_ = 0;                                 // number of the current check
  std::unordered_map<SequenceId, Starting> starting_;  // by the plan under check
};

}  // namespace treadle
