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
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/iteration_plan.h"
#include "engine/live_sequence.h"

namespace treadle {

class SequenceTable {
 public:
  struct Limits {
    int64_t page_size = 0;
    int64_t num_pages = 0;
    int64_t vocab = 0;
    int64_t context = 0;  // positions that the model can run
    int64_t max_batch_tokens = 0;
  };

  explicit SequenceTable(const Limits& limits) : limits_(limits) {}

  // Ok if the plan can be applied to the table as it is: releases name live sequences; starts name
  // new ones; page ids, token ids and positions are in range and within the sequence's pages; each
  // sequence has at most one step, which begins at or before its next position; a step without
  // tokens has a previous sample to run; the steps fit into max_batch_tokens. NotFound for an
  // unknown sequence, InvalidArgument otherwise. Changes nothing.
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
    int32_t previous_sample;
    bool stepped;
  };

  absl::Status CheckRelease(SequenceId sequence);
  absl::Status CheckStart(const SequenceStart& start);
  absl::Status CheckStep(const Step& step);
  absl::Status CheckStepTokens(const Step& step, const Target& target) const;
  absl::Status CheckPage(int32_t page, const char* what, uint64_t id) const;
  absl::Status CheckToken(int32_t token, const char* what, uint64_t id) const;
  absl::StatusOr<Target> FindTarget(SequenceId sequence);

  const Limits limits_;
  std::unordered_map<SequenceId, Entry> live_;
  uint64_t check_ = 0;                                 // number of the current check
  std::unordered_map<SequenceId, Starting> starting_;  // by the plan under check
};

}  // namespace treadle
