// The baseline of ORCA's evaluation as it was: FasterTransformer under the scheduler of section
// 6.2, which takes at most max_batch_size requests from its queue whenever the engine is idle.
// RequestLevel is a kinder one.
//
// A batch reserves K/V for max_context tokens of every sequence (section 6.1), and its answers are
// delivered when all of it has ended. Its first iteration treats all prompts as if they were as
// long as the shortest one; the rest of a longer prompt follows a token an iteration (section 6.2).
// A row whose answer has ended is computed until the batch ends: that is padding. The batch runs in
// microbatches, one after the other through the stages (Figure 8b); rows of a microbatch of which
// nothing lives count in the next one's plan.
//
// Later versions of FasterTransformer run whole prompts at once, padded to the longest one: that is
// PaddedFasterTransformer. padding() says how many rows the system would have run beside those that
// somebody asked for.
#pragma once

#include <algorithm>
#include <vector>

#include "scheduler/policy.h"

namespace treadle {

class FasterTransformer : public Policy {
 public:
  FasterTransformer() = default;
  std::string_view name() const override { return "faster-transformer"; }
  Delivery delivery() const override { return Delivery::kWhenIdle; }
  std::vector<Request*> Order(const PolicyView& view) const override { return LiveRequests(view); }
  int64_t padding() const override { return padding_; }

  Selection Select(const PolicyView& view) override {
    const bool running = std::ranges::any_of(
        view.pool, [](const auto& request) { return request->state == RequestState::kRunning; });
    Selection waiting;
    if (!running) waiting = NextBatch(view);
    padding_ = 0;
    for (size_t tried = 0; tried < microbatches_.size(); ++tried) {
      const size_t index = (next_ + tried) % microbatches_.size();
      const Microbatch& next = microbatches_[index];
      Selection selection;
      int64_t ended = next.sequences;
      for (const auto& request : view.pool) {
        if (!Has(next, *request) || !HasTokensLeft(*request)) continue;
        const bool ready = !running || IsReady(*request, view.limits);
        if (!ready) return {};  // microbatches keep their order
        selection.push_back({request.get(), 0});
        ended -= BatchSequences(*request);
      }
      padding_ += ended;
      if (selection.empty()) continue;
      next_ = index + 1;
      Assign(view, selection);
      // The others of a new batch are admitted with it.
      for (const Selected& member : waiting) {
        if (!Has(next, *member.request)) selection.push_back(member);
      }
      return selection;
    }
    return {};
  }

 protected:
  explicit FasterTransformer(bool padded) : padded_(padded) {}

 private:
  struct Microbatch {
    std::vector<RequestId> members;
    int64_t sequences = 0;  // of all members, when the batch was made
  };

  static bool Has(const Microbatch& microbatch, const Request& request) {
    return request.state != RequestState::kFinished &&
           std::ranges::find(microbatch.members, request.id) != microbatch.members.end();
  }
  static bool HasTokensLeft(const Request& request) {
    return request.state == RequestState::kWaiting ||
           std::ranges::any_of(request.sequences, [&](const Sequence& sequence) {
             return HasTokenLeft(request, sequence);
           });
  }

  // The requests of the next batch, in arrival order, which are divided into microbatches.
  Selection NextBatch(const PolicyView& view) {
    const BatchLimits& limits = view.limits;
    const int64_t most =
        limits.microbatch_size > 0 ? limits.microbatch_size : limits.max_batch_size;
    microbatches_.clear();
    next_ = 0;
    Selection selection;
    int64_t sequences = 0;
    KvCapacity left = view.kv, worst = view.kv;
    for (const auto& request : view.pool) {
      if (request->state != RequestState::kWaiting) continue;
      const int64_t size = BatchSequences(*request);
      const PageCounts pages =
          limits.max_context > 0
              ? view.kv.paging.Needed(1, limits.max_context, request->spec.candidates)
              : PageCounts();
      const bool fits = sequences + size <= limits.max_batch_size && pages.FitsIn(worst.free_pages);
      if ((!selection.empty() && !fits) || !Admits(view, left, *request)) break;
      worst.free_pages -= pages;
      sequences += size;
      const int64_t prompt = request->prompt_length();
      shortest_ = selection.empty() ? prompt : std::min(shortest_, prompt);
      longest_ = selection.empty() ? prompt : std::max(longest_, prompt);
      if (selection.empty() || microbatches_.back().sequences + size > most) {
        microbatches_.emplace_back();
      }
      microbatches_.back().members.push_back(request->id);
      microbatches_.back().sequences += size;
      selection.push_back({request.get(), 0});
    }
    return selection;
  }

  void Assign(const PolicyView& view, Selection& selection) {
    AssignTokens(view, selection);
    for (Selected& member : selection) {
      const Request& request = *member.request;
      if (request.state == RequestState::kRunning && !InInitiation(request)) continue;
      const bool first =
          request.state == RequestState::kWaiting || request.sequences[0].next_position == 0;
      if (padded_) {
        padding_ += first ? longest_ - request.prompt_length() : 0;
      } else {
        const int64_t rows = first ? shortest_ : 1;
        member.num_tokens = static_cast<int32_t>(std::min<int64_t>(member.num_tokens, rows));
      }
    }
  }

  const bool padded_ = false;
  std::vector<Microbatch> microbatches_;
  size_t next_ = 0;                     // of them
  int64_t shortest_ = 0, longest_ = 0;  // prompts of the batch
  int64_t padding_ = 0;
};

class PaddedFasterTransformer final : public FasterTransformer {
 public:
  PaddedFasterTransformer() : FasterTransformer(/*padded=*/true) {}
  std::string_view name() const override { return "faster-transformer-padded"; }
};

}  // namespace treadle
