// A scheduler for tests: takes requests through an engine by random plans.
//
// Random: who is admitted when, who is in a plan and in what order, how a prompt is cut into
// chunks, whether a decoding step carries its token or uses the previous sample, and now and then a
// piece of a prompt is run again.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "engine/iteration_plan.h"
#include "engine/kv_slot_manager.h"
#include "tests/support/reference_runner.h"

namespace treadle {

class PlanDriver {
 public:
  struct DrivenRequest {
    AloneRequest request;  // of candidate 0
    int32_t candidates = 1;
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

 private:
  struct Sequence {
    SequenceId id = 0;
    size_t request = 0;
    uint32_t candidate = 0;
    SequencePages pages;
    int32_t next_position = 0;
    int32_t submitted = 0;  // samples asked for
    int32_t in_flight = 0;
    bool started = false;
    bool released = false;
    bool ended = false;
    AloneAnswer answer;
  };

  bool Admit(size_t request);
  void StartCandidates(IterationPlan& plan);
  void AddStart(Sequence& sequence, int32_t first_position, IterationPlan& plan);
  void AddStep(Sequence& sequence, int64_t budget, IterationPlan& plan);
  const AloneRequest& RequestOf(const Sequence& sequence) const {
    return requests_[sequence.request].request;
  }

  const Options options_;
  const std::vector<DrivenRequest> requests_;
  std::mt19937 random_;
  KvSlotManager kv_;
  size_t next_request_ = 0;
  std::vector<Sequence> sequences_;  // id - 1 is the index
};

}  // namespace treadle
