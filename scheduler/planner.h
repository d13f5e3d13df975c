// Turns a policy's selection into an iteration plan: reserves pages, decides page ids and token
// inputs, and collects the releases that ride on the next plan. It decides nothing about who runs.
//
// Candidates 1..n-1 start in the first plan built after the one that contains the end of the
// prompt: stages apply plans in order, so candidate 0's K/V of the prompt is there when theirs is
// copied and shared. They recompute the prompt's last row, which gives their first token.
//
// Where an engine was restarted, what it knew of running requests is run again, in chunks as a
// prompt's: rows do not depend on how they are cut (N2), so that what follows is what would have
// been. Their pages stay theirs, so stages that did not lose what these held need not run it: those
// behind the lost ones in no case, those before only where replay logs do not have all pages.
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/iteration_plan.h"
#include "engine/kv_slot_manager.h"
#include "scheduler/ledger.h"
#include "scheduler/policy.h"

namespace treadle {

// What the loop remembers of a submitted plan. Requests in it outlive it: the pool keeps those that
// have plans in flight.
struct PlanInFlight {
  struct Target {
    Request* request = nullptr;
    uint32_t sequence = 0;  // index in request->sequences
    bool sample = false;
    int32_t end = 0;  // of its inputs' positions
  };
  std::vector<Target> steps;          // in the plan's order
  std::vector<Request*> requests;     // with at least one step, in arrival order
  std::vector<LedgerMember> members;  // one per request
  double schedule = 0;                // seconds, as in LedgerRecord
  double idle = 0;
  bool behind = false;  // another plan with steps was in flight when it was submitted

  void Clear();
};

class Planner {
 public:
  explicit Planner(KvSlotManager& kv) : kv_(kv) {}

  // Admits the members that wait (their pages must be free) and plans everyone's tokens, but for
  // those whose inputs are for other stages than the first one's: a stage that runs some of a
  // request's inputs again must run them all, for it overwrites what a window's ring held. `note`,
  // empty, gets what the loop must know when the result is back. Epoch and iteration are the
  // caller's to fill in.
  IterationPlan Build(const Selection& selection, Clock::time_point now, PlanInFlight& note);

  // The request has ended and no plan in flight names it: its pages are free from now on, and its
  // sequences are released by the next plan, which is the first that can reuse the pages.
  void Retire(Request& request);

  // A new epoch: no sequence lives. Of requests that run, what was known is to be run again.
  void NewEpoch() { releases_.clear(); }
  void Restart(Request& request);
  // Now that it stands: the stages that are without the pages' contents, and Engine::replay_pages.
  void NoteLost(Request& request, const StageRange& lost, int64_t replay_pages) const;
  // No request is left: all pages are free.
  void Reset();

 private:
  void Admit(Request& request, Clock::time_point now);
  void AddPromptChunk(Request& request, int32_t num_tokens, IterationPlan& plan,
                      PlanInFlight& note) const;
  void AddKnown(Request& request, int32_t num_tokens, IterationPlan& plan,
                PlanInFlight& note) const;
  void AddTokens(Request& request, IterationPlan& plan, PlanInFlight& note) const;
  void StartCandidate(const Request& request, Sequence& sequence, IterationPlan& plan) const;

  KvSlotManager& kv_;
  SequenceId next_sequence_ = 1;  // never reused, across epochs too
  std::vector<SequenceId> releases_;
};

}  // namespace treadle
