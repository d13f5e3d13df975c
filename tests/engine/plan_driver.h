// A scheduler for tests: takes requests through an engine by random plans.
//
// Random: who is admitted when, who is in a plan and in what order, how a prompt is cut into
// chunks, whether a decoding step carries its token or uses the previous sample, and now and then a
// piece of a prompt is run again, or a step goes back over tokens that are known and on over tokens
// that are guessed, and all of its rows are sampled. What sequences have computed is kept, and
// those whose prompts begin alike may begin after it.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "engine/kv/kv_slot_manager.h"
#include "engine/plan/iteration_plan.h"
#include "tests/support/reference_runner.h"

namespace treadle {

class PlanDriver {
 public:
  struct DrivenRequest {
    AloneRequest request;  // of candidate 0
    int32_t candidates = 1;
    bool guesses = true;  // some steps go back, and on over tokens that are guessed
  };
  struct Options {
    KvPaging paging = {.page_size = 16};
    PageCounts num_pages = 64;
    int64_t max_batch_tokens = 64;
    uint32_t seed = 0;
    bool always_previous_sample = false;
    // A sequence is in at most one plan in flight, and steps carry their tokens: what an engine
    // with several stages is given.
    bool one_plan_each = false;
  };

  PlanDriver(const Options& options, std::vector<DrivenRequest> requests);

  // True once every answer is complete and every sequence released.
  bool Done() const;
  // The next plan; it may have no steps.
  IterationPlan Next(uint64_t epoch, uint64_t iteration);
  void Absorb(const IterationResult& result);

  const AloneAnswer& answer(size_t request, uint32_t candidate) const;
  PageCounts free_pages() const { return kv_.Capacity().free_pages; }
  int64_t reused() const { return reused_; }  // positions that sequences have begun after

 private:
  struct Sequence {
    SequenceId id = 0;
    size_t request = 0;
    uint32_t candidate = 0;
    SequencePages pages;
    int32_t next_position = 0;
    int32_t begun = 0;      // where it started
    int32_t written = 0;    // the end of what its steps ever wrote
    int32_t submitted = 0;  // samples asked for
    int32_t in_flight = 0;
    bool started = false;
    bool released = false;
    bool ended = false;
    bool strayed = false;          // the last step may have run on after another token
    std::vector<int32_t> guessed;  // inputs of the step in flight, of which all rows are sampled
    AloneAnswer answer;
  };

  bool Admit(size_t request);
  void StartCandidates(IterationPlan& plan);
  void AddStart(Sequence& sequence, int32_t first_position, IterationPlan& plan);
  int32_t Reuse(Sequence& first, IterationPlan& plan);
  void Keep(const IterationPlan& plan);
  void KeepCopies(const Sequence& sequence, IterationPlan& plan);
  void AddStep(Sequence& sequence, int64_t budget, IterationPlan& plan);
  void Guess(Sequence& sequence, int64_t budget, Step& step);
  void AbsorbToken(Sequence& sequence, const RowResult& row);
  const AloneRequest& RequestOf(const Sequence& sequence) const {
    return requests_[sequence.request].request;
  }

  const Options options_;
  const std::vector<DrivenRequest> requests_;
  std::mt19937 random_;
  KvSlotManager kv_;
  int64_t reused_ = 0;
  size_t next_request_ = 0;
  std::vector<Sequence> sequences_;  // id - 1 is the index
};

}  // namespace treadle
