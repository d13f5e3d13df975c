// The live sequences of a stage, and the check that a plan must pass before anything is touched.
//
// A sequence is made by its start and dropped by its release. Plans come from another room and,
// with worker processes, from another machine: whatever a plan says that would reach outside the
// cache, the vocabulary or the batch buffers is an error that names it, not a crash; and no more
// sequences are live than the cache has pages, for each of them has a page that no other one has.
//
// Thread safety: confined to the rank's thread. Check and At do not allocate in the steady state
// (plans without starts).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

class Adapter;  // models/adapter.h

// The tag of a position whose row comes of `token` after rows with the tag `before` (the first: the
// sequence's adapter), a hash chain over the ids up to it (engine/kv/slot_tags.h). Never 0.
uint64_t NextTag(uint64_t before, int32_t token);

// One sequence on a stage: its start, the token ids by position, and what follows from them.
//
// A token is entered when it is an input of a step, never when it is sampled: ids() therefore names
// exactly the positions whose K/V are in the cache. Counts for penalties are kept in step with the
// ids, and only when the sampling parameters ask for them.
//
// Invariants: 1. ids().size() == next_position() <= capacity(). 2. counts() is ascending by token,
// without zero entries, and equals the tally of ids() that are text. 3. The previous sample, if
// there is one, belongs at next_position().
// Thread safety: confined to the rank's thread. After construction nothing here allocates.
class LiveSequence {
 public:
  // `start` was checked (see SequenceTable::Check). Positions before its first one have the ids of
  // start.earlier_tokens. `capacity`: the most positions that it will have.
  LiveSequence(const SequenceStart& start, int64_t capacity);

  const SequenceStart& start() const { return start_; }
  int64_t capacity() const { return capacity_; }
  // The end of what was ever written; later steps may have gone back.
  int64_t written() const { return written_; }
  int64_t next_position() const { return static_cast<int64_t>(ids_.size()); }
  std::span<const int32_t> ids() const { return ids_; }  // [next_position()]
  std::span<const TokenCount> counts() const { return counts_; }
  // counts() as it was when the sequence ended before `position`; allocates.
  std::vector<TokenCount> CountsBefore(int64_t position) const;
  // Tags of positions [0, end), or of those before the first whose id is not known yet.
  std::span<const uint64_t> Tags(int64_t end);
  // The stage's pages hold the rows of positions before it: it has computed them since the start,
  // or has checked their tags.
  int64_t held() const { return held_; }
  void SetHeld(int64_t end) { held_ = end; }
  // -1: none. Below: the host has not seen it yet (Backend::Embed says what the number means).
  int32_t previous_sample() const { return previous_sample_; }
  bool counting() const { return counting_; }  // its sampling needs counts()
  // The adapter of SequenceStart, for as long as the sequence lives; null: none.
  const Adapter* adapter() const { return adapter_.get(); }
  // virtual_tokens: Adapter::virtual_tokens, positions whose ids are no text: nothing counts them.
  void SetAdapter(std::shared_ptr<const Adapter> adapter, int32_t virtual_tokens);
  int32_t virtual_tokens() const { return virtual_tokens_; }
  // [hidden]: the sum of its final hidden states, with mean_pooling; kept by the last stage.
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
  std::vector<uint64_t> tags_;  // of the first positions
  int64_t held_ = 0;
  int32_t previous_sample_ = -1;
  std::vector<float> pooled_;
  std::shared_ptr<const Adapter> adapter_;
  int32_t virtual_tokens_ = 0;
};

class SequenceTable {
 public:
  struct Limits {
    int64_t page_size = 0;
    PageCounts num_pages;
    int64_t window = 0;     // KvPaging::window
    bool in_order = false;  // a step's rows are written one after the other (states)
    int64_t vocab = 0;
    int64_t context = 0;  // positions that the model can run
    int64_t max_batch_tokens = 0;
  };

  explicit SequenceTable(const Limits& limits) : limits_(limits) {}

  // Ok if the plan can be applied to the table as it is: releases name live sequences; starts name
  // new ones, not more than there are pages; page ids, token ids and positions are in range and
  // within the sequence's pages, of which the window's are a ring that holds all that a step writes
  // and looks back at; each sequence has at most one step, which begins at or before its next
  // position; a step without tokens has a previous sample to run; outputs ask for something
  // that there is; the steps fit into max_batch_tokens, unless no stage runs them. NotFound for an
  // unknown sequence, InvalidArgument otherwise. Changes nothing.
  absl::Status Check(const IterationPlan& plan);

  // Require a plan that was checked.
  void Release(SequenceId sequence);
  // ResourceExhausted if there is no memory for one of them: none is started then.
  absl::Status Start(std::span<const SequenceStart> starts);
  LiveSequence& At(SequenceId sequence);
  LiveSequence* Find(SequenceId sequence);  // null: not live

  size_t size() const { return live_.size(); }
  void Clear() { live_.clear(); }

 private:
  // Notes of the check of a plan about a sequence. A note counts only while its `check` is that
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
  absl::Status CheckLive(const IterationPlan& plan) const;
  absl::Status CheckStart(const SequenceStart& start);
  absl::Status CheckLoad(const PageLoad& load) const;
  absl::Status CheckPages(const SequenceStart& start) const;
  absl::Status CheckStep(const Step& step);
  absl::Status CheckRing(const Step& step, const Target& target) const;
  absl::Status CheckOutputs(const Step& step) const;
  absl::Status CheckPooling(const Step& step, const Target& target) const;
  absl::Status CheckStepTokens(const Step& step, const Target& target) const;
  absl::Status CheckSampling(const SamplingParameters& sampling, SequenceId id) const;
  absl::Status CheckEntries(size_t entries, const char* what, SequenceId id) const;
  absl::Status CheckPage(int32_t page, PageKind kind, const char* what, uint64_t id) const;
  absl::Status CheckToken(int32_t token, const char* what, uint64_t id) const;
  absl::StatusOr<Target> FindTarget(SequenceId sequence);
  // Positions that the tables name pages for and the model can run.
  int64_t CapacityOf(const SequencePages& pages) const;

  const Limits limits_;
  std::unordered_map<SequenceId, Entry> live_;
  uint64_t check_ = 0;                                 // number of the current check
  std::unordered_map<SequenceId, Starting> starting_;  // by the plan under check
};

}  // namespace treadle
