// Turns a policy's selection into an iteration plan: reserves pages, decides page ids and token
// inputs, and collects the releases that ride on the next plan. It decides nothing about who runs.
//
// Candidates 1..n-1 start in the first plan built after the one that contains the end of the
// prompt: stages apply plans in order, so candidate 0's K/V of the prompt is there when theirs is
// copied and shared. They recompute the prompt's last row, which gives their first token.
//
// A prompt begins after what of it the prefix cache has by then, and what a plan computes of it is
// in the cache for the plans after that one. Where prompts part and a ring will be overwritten, be
// the other one in the cache (KvSlotManager::BranchOf) or to begin, a chunk ends, and the plan with
// the next one has copies made. Who may begin after these waits for that plan.
//
// Where an engine was restarted, the known inputs of running requests are run again, in chunks as a
// prompt's (progress.h).
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

#include "engine/kv/kv_slot_manager.h"
#include "engine/plan/iteration_plan.h"
#include "scheduler/cost/iteration_cost.h"
#include "scheduler/ledger.h"
#include "scheduler/policy.h"

namespace treadle {

// The loop's memory of a submitted plan. Requests in it outlive it: the pool keeps those that
// have plans in flight.
struct PlanInFlight {
  struct Target {
    Request* request = nullptr;
    uint32_t sequence = 0;  // index in request->sequences
    int32_t samples = 0;    // tokens asked
    int32_t end = 0;        // of its inputs' positions, guessed ones too
  };
  std::vector<Target> steps;          // in the plan's order
  std::vector<Request*> requests;     // with at least one step, in arrival order
  std::vector<LedgerMember> members;  // one per request
  std::vector<PageName> stores;       // of the plan's page stores
  std::vector<int32_t> copies;        // pages that the plan has copied for the prefix cache
  int64_t admitted = 0, begun = 0;    // requests, by this plan
  IterationWork work = 0;
  int64_t padding = 0;  // as Policy::padding
  double schedule = 0;  // seconds, as in LedgerRecord
  double idle = 0;
  bool behind = false;  // another plan with steps was in flight when it was submitted

  void Clear();
};

class Planner {
 public:
  // A branch spares those that begin there at least so many pages.
  static constexpr int32_t kLeastSpared = 4;

  explicit Planner(KvSlotManager& kv) : kv_(kv) {}

  // Admits the members that wait (their pages must be free) and plans everyone's tokens, but for
  // those whose inputs are for other stages than the first one's: a stage that runs some of a
  // request's inputs again must run them all, for it overwrites what a window's ring held. `note`,
  // empty, gets what the loop must know when the result is back. Epoch and iteration are the
  // caller's to fill in.
  IterationPlan Build(const Selection& selection, Clock::time_point now, PlanInFlight& note);

  // Keeps pages for a sequence of so many rows, which AddPadding runs for nobody. REQUIRES: they
  // are free.
  void ReservePadding(int64_t rows);
  // Such a sequence, which begins with the plan and ends with the next one. Its rows read each
  // other and have no output. Nothing if there are none, or not all stages run the plan.
  void AddPadding(int64_t rows, IterationPlan& plan);

  // The prefix cache's pages for a request that is to begin, with those that were read for it.
  KvSlotManager::Found Cached(const Request& request) const;

  // The request has ended and no plan in flight names it: its pages are free from now on, and its
  // sequences are released by the next plan, which is the first that can reuse the pages. What they
  // hold stays in the cache.
  void Retire(Request& request);

  // An epoch has ended: the cache has nothing of the request but what is known.
  void NoteLost(const Request& request);
  // So was a plan in flight.
  void NoteLost(const PlanInFlight& plan) { kv_.ForgetCopies(plan.copies); }
  // A new epoch: no sequence lives. The known tokens of running requests are to be run again.
  void NewEpoch() { releases_.clear(); }
  void Restart(Request& request);
  // Some pages have lost what they held.
  void ForgetCached() { kv_.ForgetAll(); }
  // No request is left: all pages are free.
  void Reset();

 private:
  void Admit(Request& request);
  int32_t Writable(const Request& request, int32_t num_tokens);
  int32_t UpToBranch(Request& request, int32_t num_tokens, const Selection& selection) const;
  bool WaitsForCopies(const Request& request) const;
  void Bind(Request& request);
  void KeepChunks(const IterationPlan& plan);
  void AddPromptChunk(Request& request, int32_t num_tokens, IterationPlan& plan,
                      PlanInFlight& note);
  void AddKnown(Request& request, int32_t num_tokens, IterationPlan& plan,
                PlanInFlight& note) const;
  int32_t AddTokens(Request& request, IterationPlan& plan, PlanInFlight& note) const;
  void NoteWrites(Sequence& sequence, int32_t end) const;
  void AddLoads(Request& request, IterationPlan& plan) const;
  void StartCandidate(const Request& request, Sequence& sequence, IterationPlan& plan) const;

  KvSlotManager& kv_;
  SequenceId next_sequence_ = 1;  // never reused, across epochs too
  std::vector<SequenceId> releases_;
  SequencePages padding_;
  // For the plan that is being built: requests with a part of a prompt in it, and shared pages it
  // writes.
  std::vector<const Request*> chunked_;
  std::unordered_set<int32_t> written_;
};

}  // namespace treadle
