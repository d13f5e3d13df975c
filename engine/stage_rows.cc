// The rows that the pages of a stage hold: which a plan reads, computes, or leaves to other stages.
#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/stage.h"

namespace treadle {

// Stores and loads can be made here, and loads bring as many bytes as a page has.
absl::Status Stage::CheckPageBytes(const IterationPlan& plan) const {
  if (plan.page_stores.empty() && plan.page_loads.empty()) return absl::OkStatus();
  if (backend_.asynchronous() || ranks_ != nullptr || link_ != nullptr) {
    return InvalidArgument("plan stores or loads pages, expected one stage of one rank on the CPU");
  }
  for (const PageLoad& load : plan.page_loads) {
    if (std::ssize(load.bytes) == cache_.whole_page_bytes()) continue;
    return InvalidArgument("page load ", load.index, " of sequence ", load.sequence, " has ",
                           load.bytes.size(), " bytes, expected ", cache_.whole_page_bytes());
  }
  return absl::OkStatus();
}

void Stage::LoadPage(const PageLoad& load) {
  LiveSequence& live = sequences_.At(load.sequence);
  const int64_t slots = cache_.layout().page_size;
  const auto tags = live.Tags((load.index + 1) * slots).last(static_cast<size_t>(slots));
  cache_.WriteWholePage(live.start().pages[PageKind::kWhole][load.index], load.bytes, tags);
}

// The rows that the steps look back at are there.
absl::Status Stage::CheckHeld(const IterationPlan& plan) {
  const int64_t window = KvPaging::WindowOf(model_.config(), cache_.layout().page_size);
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    const int64_t first = step.first_position;
    const int64_t held = live_[i]->held();
    TREADLE_RETURN_IF_ERROR(CheckTags(*live_[i], PageKind::kWhole, held, first));
    TREADLE_RETURN_IF_ERROR(
        CheckTags(*live_[i], PageKind::kWindow, std::max(held, first - window + 1), first));
    live_[i]->SetHeld(first + step.num_tokens);
  }
  return absl::OkStatus();
}

absl::Status Stage::CheckTags(LiveSequence& sequence, PageKind kind, int64_t first, int64_t end) {
  if (first >= end) return absl::OkStatus();
  const auto missing = cache_.tags().FirstMissing(kind, sequence.start().pages, first,
                                                  sequence.Tags(end).subspan(first));
  if (!missing) return absl::OkStatus();
  return absl::DataLossError(Str("the pages of sequence ", sequence.start().sequence,
                                 " do not hold its row at position ", *missing,
                                 ", which this stage has not computed in this epoch"));
}

// The plan's rows are whole: logs what goes to the next stage, and sets the rows' tags. A later
// plan may have released a sequence: nobody will ask for its rows. `again`: once the plan has run,
// for the rows whose ids were not known when it began; where the others were, a ring may hold rows
// of a plan that began since.
void Stage::NoteRows(const Begun& begun, bool again) {
  if (!begun.plan->stages.Contains(stage_)) return;
  int64_t next_row = 0;
  for (const Step& step : begun.plan->steps) {
    const int64_t row = std::exchange(next_row, next_row + step.num_tokens);
    LiveSequence* const live = sequences_.Find(step.sequence);
    if (live == nullptr) continue;
    const SequencePages& pages = live->start().pages;
    if (log_ != nullptr && begun.to_send) {
      log_->Write(pages[PageKind::kWhole], step.first_position,
                  begun.message.Rows(row, step.num_tokens));
    }
    if (again && !step.tokens.empty()) continue;
    const auto tags = live->Tags(int64_t{step.first_position} + step.num_tokens);
    const auto first = std::min(tags.size(), static_cast<size_t>(step.first_position));
    cache_.tags().Set(pages, step.first_position, tags.subspan(first));
  }
}

// Whether this stage can leave a plan's rows to others.
absl::Status Stage::CheckPassing(const IterationPlan& plan) {
  const bool sends = link_ != nullptr && !model_.last_stage() && RowsTo(stage_ + 1, plan) > 0;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if ((!step.outputs.empty() || live_[i]->start().mean_pooling) && model_.last_stage()) {
      return InvalidArgument("a step of sequence ", step.sequence, " gives something, but stages ",
                             plan.stages.begin, " to ", plan.stages.end - 1,
                             " run it, which the last is not among");
    }
    if (!sends) continue;
    if (log_ == nullptr ||
        !log_->Holds(live_[i]->start().pages[PageKind::kWhole], live_[i]->next_position())) {
      return InvalidArgument("a step of sequence ", step.sequence, " is to come from the log of ",
                             "stage ", stage_, ", which does not have its pages");
    }
    TREADLE_RETURN_IF_ERROR(CheckTags(*live_[i], PageKind::kWhole, step.first_position,
                                      int64_t{step.first_position} + step.num_tokens));
  }
  return absl::OkStatus();
}

// Passes the messages of a plan that other stages run. Rows come from the log, if the next stage
// runs.
absl::Status Stage::PassBy(const IterationPlan& plan, Begun& begun) {
  TREADLE_RETURN_IF_ERROR(CheckPassing(plan));
  begun.experts = {};
  if (link_ != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(begun.message, link_->Receive(plan.epoch, plan.iteration, 0));
    begun.to_send = !model_.last_stage();
  }
  Times& times = begun.times;
  times.received = times.forwarded = times.sent = times.sampled = Times::Clock::now();
  return absl::OkStatus();
}

}  // namespace treadle
