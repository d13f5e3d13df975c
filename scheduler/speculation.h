// Which guesses of its sequences' next tokens a plan verifies.
//
// A row more is worth its time if it brings tokens faster than the iteration does without it: of
// probability p, it is taken if p / (a row's time) > (the iteration's tokens) / (its time). So a
// sequence alone tries what a batch of 32 does not, and nothing is tried where guesses are wrong.
//
// A draft model (draft_model.h) guesses before the plan is made. How far it runs ahead is decided
// by the same rule, where a step of it costs time, too, and by how often it was right.
//
// A guess continues what is known, so a sequence with guesses worth a row is in no plan beside the
// one that samples its last token: with a plan in flight the loop waits for its result (Waits).
//
// Thread safety: confined to the serving loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "scheduler/cost/iteration_cost.h"
#include "scheduler/policy.h"
#include "scheduler/request/drafter.h"
#include "scheduler/speculation/draft_model.h"

namespace treadle {

class Speculation {
 public:
  static constexpr int32_t kMaxDraft = 15;  // a step of 16 rows

  // `limits` and `cost` outlive it, and may change. `model`: of the requests that want one
  // (Speculate::kDraft); null: there is none.
  Speculation(MakeDrafter make, const BatchLimits& limits, const IterationCost& cost,
              DraftModel* model = nullptr)
      : make_(std::move(make)), limits_(limits), cost_(cost), model_(model) {}

  // The sequence's output has another token.
  void NoteToken(const Request& request, Sequence& sequence) const;
  // Takes the draft of a sequence whose rows sampled this, counts it, and gives the number of its
  // guesses that are wrong. Samples after a wrong one are nobody's.
  static size_t TakeDraft(Request& request, Sequence& sequence, std::span<const RowResult> samples);

  // Some sequence in a plan in flight has guesses that are being verified, or that a plan of these
  // requests would verify if it had the result.
  bool Waits(std::span<const std::unique_ptr<Request>> live) const;
  // Sets the drafts of the sequences that the selected requests' next tokens come of. The draft
  // model runs meanwhile if it `may`: it shares the machine.
  void Choose(const Selection& selection, bool model_may_run) const;

 private:
  // A sequence whose draft model would guess at most so many tokens.
  struct Promising {
    Drafter* drafter;
    double promise;
    int32_t most;
  };

  double Worth(double tokens, double rows) const;
  std::vector<DraftModel::Wanted> WorthDrafting(std::span<const Promising> sequences, double tokens,
                                                double rows) const;
  bool WaitsForModel(std::span<const std::unique_ptr<Request>> live, double rows) const;
  static int32_t MostGuesses(const Request& request, const Sequence& sequence);

  const MakeDrafter make_;
  const BatchLimits& limits_;
  const IterationCost& cost_;
  DraftModel* const model_;
};

}  // namespace treadle
