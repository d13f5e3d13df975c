#include "engine/record/replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/status.h"
#include "engine/plan/plan_messages.h"
#include "engine/record/live_inputs.h"
#include "engine/record/record.pb.h"
#include "engine/record/record_file.h"

namespace treadle {
namespace {

// Compares what was recorded of one iteration with what came of it now.
class Comparison {
 public:
  Comparison(const IterationPlan& plan, float tolerance, ReplayReport& report)
      : plan_(plan), tolerance_(tolerance), report_(report) {}

  void Compare(const IterationResult& recorded, const IterationResult& found) {
    if (found.steps.size() != recorded.steps.size() || plan_.steps.size() != found.steps.size()) {
      return Differ(0, Str("there are results of ", found.steps.size(), " steps, recorded ",
                           recorded.steps.size()));
    }
    for (size_t i = 0; i < found.steps.size() && !report_.difference; ++i) {
      CompareStep(i, recorded.steps[i], found.steps[i]);
    }
  }

 private:
  // `row`: of the step, after which the token comes that differs; -1: its last one.
  void Differ(size_t step, std::string what, int32_t row = -1) {
    if (report_.difference) return;
    ReplayDifference difference{.at = {plan_.epoch, plan_.iteration}, .step = step};
    if (step < plan_.steps.size()) {
      const Step& planned = plan_.steps[step];
      difference.sequence = planned.sequence;
      difference.position = planned.first_position + (row < 0 ? planned.num_tokens : row + 1);
    }
    difference.what = std::move(what);
    report_.difference = std::move(difference);
  }

  bool Same(float recorded, float found) {
    if (std::bit_cast<uint32_t>(recorded) == std::bit_cast<uint32_t>(found)) return true;
    return std::fabs(recorded - found) <= tolerance_ && tolerance_ > 0;
  }

  void CompareNumber(size_t step, const std::string& name, float recorded, float found) {
    ++report_.logprobs;
    if (Same(recorded, found)) return;
    Differ(step, Str(name, " is ", std::hexfloat, found, ", recorded ", recorded));
  }

  void CompareDetail(size_t step, const std::string& name, const TokenDetail& recorded,
                     const TokenDetail& found) {
    CompareNumber(step, Str("log probability of ", name), recorded.logprob, found.logprob);
    if (tolerance_ > 0) return;  // neighbours may change places
    if (recorded.top.size() != found.top.size()) {
      Differ(step,
             Str(name, " has ", found.top.size(), " alternatives, recorded ", recorded.top.size()));
      return;
    }
    for (size_t i = 0; i < found.top.size(); ++i) {
      if (found.top[i].token != recorded.top[i].token) {
        Differ(step, Str("alternative ", i, " to ", name, " is ", found.top[i].token, ", recorded ",
                         recorded.top[i].token));
      }
      CompareNumber(step, Str("log probability of alternative ", i, " to ", name),
                    recorded.top[i].logprob, found.top[i].logprob);
    }
  }

  void CompareStep(size_t i, const StepResult& recorded, const StepResult& found) {
    const size_t asked = plan_.steps[i].outputs.size();
    if (recorded.outputs.size() != asked || found.outputs.size() != asked) {
      return Differ(i, Str(found.outputs.size(), " outputs, recorded ", recorded.outputs.size(),
                           ", asked ", asked));
    }
    for (size_t k = 0; k < asked; ++k) {
      CompareRow(i, plan_.steps[i].outputs[k], recorded.outputs[k], found.outputs[k]);
    }
  }

  void CompareRow(size_t i, const RowOutput& asked, const RowResult& recorded,
                  const RowResult& found) {
    if (found.token >= 0) ++report_.tokens;
    if (found.token != recorded.token) {
      return Differ(i, Str("token is ", found.token, ", recorded ", recorded.token), asked.row);
    }
    if (found.hidden.size() != recorded.hidden.size()) {
      return Differ(i, Str(found.hidden.size(), " elements of a hidden state, recorded ",
                           recorded.hidden.size()));
    }
    if (asked.top_logprobs >= 0) CompareDetail(i, "the token", recorded.detail, found.detail);
    if (asked.target >= 0) {
      const int64_t position = int64_t{plan_.steps[i].first_position} + asked.row + 1;
      CompareDetail(i, Str("the given token at ", position), recorded.target, found.target);
    }
    for (size_t k = 0; k < found.hidden.size(); ++k) {
      CompareNumber(i, Str("element ", k, " of the hidden state"), recorded.hidden[k],
                    found.hidden[k]);
    }
  }

  const IterationPlan& plan_;
  const float tolerance_;
  ReplayReport& report_;
};

// Reads a recording entry by entry, until its end or a place in it.
class Run {
 public:
  Run(int64_t max_batch_tokens, PlanRunner& runner, const ReplayOptions& options)
      : max_batch_tokens_(max_batch_tokens), runner_(runner), options_(options) {}

  // False: there is no more to do.
  absl::StatusOr<bool> Handle(const record::Entry& entry) {
    if (entry.has_restored()) return Restore(entry.restored());
    if (entry.has_plan()) {
      TREADLE_ASSIGN_OR_RETURN(IterationPlan plan, DecodePlan(entry.plan()));
      const RecordedPlace place{plan.epoch, plan.iteration};
      plans_[place] = std::move(plan);
    } else if (entry.has_masks()) {
      TREADLE_ASSIGN_OR_RETURN(auto masks, DecodeMasks(entry.masks()));
      auto& all = masks_[{entry.masks().epoch(), entry.masks().iteration()}];
      for (OutputMask& mask : masks) all.push_back(std::move(mask));
    } else if (entry.has_result()) {
      return Answered(entry.result());
    }
    return true;
  }

  ReplayReport TakeReport() { return std::move(report_); }

 private:
  absl::StatusOr<bool> Restore(const proto::Plan& message) {
    TREADLE_ASSIGN_OR_RETURN(const IterationPlan everything, DecodePlan(message));
    if (everything.epoch < options_.first_epoch) return true;
    live_.Restore(everything);
    TREADLE_RETURN_IF_ERROR(Begin(everything.epoch));
    return RunAhead(LiveInputs::Chunks(everything, max_batch_tokens_), everything);
  }

  // Plans that are not recorded, in front of one that is.
  absl::StatusOr<bool> RunAhead(std::vector<IterationPlan> plans, const IterationPlan& recorded) {
    for (IterationPlan& plan : plans) {
      plan.epoch = recorded.epoch;
      plan.iteration = recorded.iteration;
      if (options_.before) options_.before(plan);
      TREADLE_RETURN_IF_ERROR(runner_.Run(std::move(plan), {}).status());
      if (options_.after && !options_.after()) return false;
    }
    return true;
  }

  // Takes from a plan the starts of prompts that the server had begun in its prefix cache: they are
  // computed from the beginning here. So a recording needs nothing that came before it, and what
  // was wrong in the cache shows as a difference.
  std::vector<IterationPlan> TakeReused(IterationPlan& plan) const {
    IterationPlan everything;
    for (const SequenceStart& start : plan.starts) {
      if (start.first_position == 0 || start.candidate > 0) continue;
      SequenceStart& anew = everything.starts.emplace_back(start);
      everything.steps.push_back({.sequence = start.sequence,
                                  .num_tokens = anew.first_position,
                                  .tokens = std::exchange(anew.earlier_tokens, {})});
      anew.first_position = 0;
      const std::vector<int32_t>& ring = start.pages[PageKind::kWindow];
      std::erase_if(plan.page_copies[PageKind::kWindow],
                    [&](const PageCopy& copy) { return std::ranges::count(ring, copy.to) > 0; });
    }
    if (everything.starts.empty()) return {};
    std::erase_if(plan.starts, [](const SequenceStart& start) {
      return start.first_position > 0 && start.candidate == 0;
    });
    std::vector<IterationPlan> ahead = LiveInputs::Chunks(everything, max_batch_tokens_);
    ahead[0].releases = std::exchange(plan.releases, {});
    ahead[0].page_copies = std::exchange(plan.page_copies, {});
    return ahead;
  }

  absl::Status Begin(uint64_t epoch) {
    epoch_ = epoch;
    return runner_.BeginEpoch();
  }

  absl::StatusOr<bool> Answered(const proto::Result& message) {
    TREADLE_ASSIGN_OR_RETURN(const IterationResult recorded, DecodeResult(message));
    const RecordedPlace place{recorded.epoch, recorded.iteration};
    const auto plan = plans_.extract(place);
    const auto masks = masks_.extract(place);
    if (place.epoch < options_.first_epoch) return true;
    if (options_.until && place > *options_.until) return false;
    if (plan.empty()) {
      return InvalidArgument("iteration ", place.iteration, " of epoch ", place.epoch,
                             " has a result and no plan");
    }
    if (epoch_ != place.epoch) {
      live_.Clear();
      TREADLE_RETURN_IF_ERROR(Begin(place.epoch));
    }
    const IterationPlan told = live_.WithTokens(plan.mapped());
    IterationPlan rest = told;
    TREADLE_ASSIGN_OR_RETURN(const bool more, RunAhead(TakeReused(rest), told));
    if (!more) return false;
    if (options_.before) options_.before(told);
    TREADLE_ASSIGN_OR_RETURN(
        const IterationResult found,
        RunEverywhere(std::move(rest), masks.empty() ? std::vector<OutputMask>() : masks.mapped()));
    live_.Apply(told, recorded);
    ++report_.iterations;
    Comparison(told, options_.tolerance, report_).Compare(recorded, found);
    if (report_.difference) {
      const auto live = live_.live().find(report_.difference->sequence);
      if (live != live_.live().end()) report_.difference->candidate = live->second.start.candidate;
      return false;
    }
    return !options_.after || options_.after();
  }

  // On all stages, whichever ran it then: the others had the same rows already, or the caches would
  // not be as they were. What none had to run may be more than one plan.
  absl::StatusOr<IterationResult> RunEverywhere(IterationPlan plan, std::vector<OutputMask> masks) {
    const bool run = !std::exchange(plan.stages, {}).empty();
    if (run || plan.num_tokens() <= max_batch_tokens_) {
      return runner_.Run(std::move(plan), std::move(masks));
    }
    const std::vector<Step> steps = std::exchange(plan.steps, {});
    TREADLE_ASSIGN_OR_RETURN(IterationResult result, runner_.Run(plan, {}));
    const IterationPlan none{.epoch = plan.epoch, .iteration = plan.iteration};
    for (const Step& step : steps) {
      if (std::ssize(step.tokens) != step.num_tokens) {
        return InvalidArgument("a step of sequence ", step.sequence, " has ", step.tokens.size(),
                               " tokens, expected ", step.num_tokens);
      }
      for (int32_t done = 0; done < step.num_tokens;) {
        plan = none;
        Step& part = plan.steps.emplace_back(step);
        part.first_position = step.first_position + done;
        part.num_tokens =
            static_cast<int32_t>(std::min<int64_t>(step.num_tokens - done, max_batch_tokens_));
        part.tokens.assign(step.tokens.begin() + done,
                           step.tokens.begin() + done + part.num_tokens);
        done += part.num_tokens;
        TREADLE_RETURN_IF_ERROR(runner_.Run(std::move(plan), {}).status());
      }
      result.steps.push_back({.sequence = step.sequence});
    }
    return result;
  }

  const int64_t max_batch_tokens_;
  PlanRunner& runner_;
  const ReplayOptions& options_;
  std::optional<uint64_t> epoch_;
  LiveInputs live_;
  std::map<RecordedPlace, IterationPlan> plans_;  // without a result so far
  std::map<RecordedPlace, std::vector<OutputMask>> masks_;
  ReplayReport report_;
};

}  // namespace

absl::StatusOr<ReplayReport> Replay(std::string_view recording, int64_t max_batch_tokens,
                                    PlanRunner& runner, const ReplayOptions& options) {
  TREADLE_ASSIGN_OR_RETURN(RecordReader reader, RecordReader::Open(recording));
  Run run(max_batch_tokens, runner, options);
  record::Entry entry;
  while (true) {
    TREADLE_ASSIGN_OR_RETURN(const bool there, reader.Next(entry));
    if (!there) break;
    TREADLE_ASSIGN_OR_RETURN(const bool more, run.Handle(entry));
    if (!more) break;
  }
  return run.TakeReport();
}

}  // namespace treadle
