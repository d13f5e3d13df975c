#include "scheduler/cost/calibration.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "engine/kv/kv_slot_manager.h"

namespace treadle {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int64_t kMaxSequences = 32;
constexpr int64_t kPositions = 64;  // of each sequence: more than it has steps
constexpr int kRounds = 3;
constexpr std::chrono::seconds kPatience{10};  // for the engine to stand

class Run {
 public:
  Run(Engine& engine, const Calibration& how, IterationCost& cost)
      : engine_(engine), how_(how), cost_(cost), kv_(how.pages, how.paging) {}

  absl::StatusOr<uint64_t> All() {
    TREADLE_RETURN_IF_ERROR(Stand());
    TREADLE_RETURN_IF_ERROR(
        RunTokens(1));  // the first time is no measure: memory is new, threads sleep
    for (int round = 0; round < kRounds; ++round) {
      for (int64_t count = 1; count <= std::min(kMaxSequences, how_.max_batch_tokens); count *= 2) {
        TREADLE_RETURN_IF_ERROR(RunTokens(count));
      }
      const int64_t longest = std::min(how_.max_batch_tokens, how_.max_context);
      for (int64_t rows = 2 * kMaxSequences; rows <= longest; rows *= 2) {
        TREADLE_RETURN_IF_ERROR(RunPrompt(rows));
      }
    }
    for (const Sequence& sequence : sequences_) releases_.push_back(sequence.id);
    TREADLE_RETURN_IF_ERROR(Submit({}));
    return iterations_;
  }

 private:
  struct Sequence {
    SequenceId id = 0;
    SequencePages pages;
    int32_t next_position = 0;
    int32_t sample = 0;  // its next input, once it has run
  };

  absl::Status Stand() {
    const auto until = SteadyClock::now() + kPatience;
    while (!engine_.HasRoom()) {
      TREADLE_RETURN_IF_ERROR(engine_.status());
      if (SteadyClock::now() >= until) {
        return absl::DeadlineExceededError("the engine takes no plans");
      }
      how_.wait(until);
    }
    return absl::OkStatus();
  }

  // Nullopt: the cache has no pages for another one.
  std::optional<Sequence> Start(int64_t positions, IterationPlan& plan) {
    auto pages = kv_.Admit(1, std::min(positions, how_.max_context), 1);
    if (!pages) return std::nullopt;
    Sequence sequence{.id = next_sequence_++, .pages = pages->front()};
    SequenceStart start;
    start.sequence = sequence.id;
    start.prompt_length = 1;
    start.pages = sequence.pages;
    start.sampling.temperature = 0;
    plan.starts.push_back(std::move(start));
    return sequence;
  }

  void AddStep(Sequence& sequence, int64_t rows, IterationPlan& plan) const {
    Step step{.sequence = sequence.id,
              .first_position = sequence.next_position,
              .num_tokens = static_cast<int32_t>(rows),
              .outputs = {{.row = static_cast<int32_t>(rows - 1), .sample = true}}};
    for (int64_t row = 0; row < rows; ++row) {
      const uint64_t some = sequence.id * 31 + static_cast<uint64_t>(row) * 7919;
      step.tokens.push_back(static_cast<int32_t>(some % static_cast<uint64_t>(how_.vocab)));
    }
    if (sequence.next_position > 0) step.tokens.front() = sequence.sample;
    sequence.next_position += static_cast<int32_t>(rows);
    plan.steps.push_back(std::move(step));
  }

  // A token of each of so many sequences.
  absl::Status RunTokens(int64_t count) {
    const auto rows = static_cast<double>(count);
    const int32_t read = sequences_.empty() ? 1 : sequences_[0].next_position + 1;
    if (!Fits({rows, rows * read, rows})) return absl::OkStatus();
    IterationPlan plan;
    while (std::ssize(sequences_) < count) {
      const auto sequence = Start(kPositions, plan);
      if (!sequence) break;
      sequences_.push_back(*sequence);
    }
    for (Sequence& sequence : sequences_) {
      if (std::ssize(plan.steps) == count) break;
      if (sequence.next_position < std::min(kPositions, how_.max_context))
        AddStep(sequence, 1, plan);
    }
    return plan.steps.empty() ? absl::OkStatus() : Submit(std::move(plan));
  }

  // So many tokens of a sequence that begins.
  absl::Status RunPrompt(int64_t rows) {
    const auto all = static_cast<double>(rows);
    if (!Fits({all, all * (all + 1) / 2, 1})) return absl::OkStatus();
    IterationPlan plan;
    auto sequence = Start(rows, plan);
    if (!sequence) return absl::OkStatus();
    AddStep(*sequence, rows, plan);
    TREADLE_RETURN_IF_ERROR(Submit(std::move(plan)));
    releases_.push_back(sequence->id);
    kv_.Release(sequence->pages);
    return absl::OkStatus();
  }

  bool Fits(const IterationWork& work) const {
    return noted_ == 0 || spent_ + cost_.Of(work) <= how_.budget;
  }

  // Runs the plan, and learns from it.
  absl::Status Submit(IterationPlan plan) {
    plan.epoch = engine_.epoch();
    plan.iteration = iterations_++;
    plan.releases = std::exchange(releases_, {});
    const IterationWork work = WorkOf(plan);
    engine_.Submit(std::move(plan));
    while (true) {
      const std::vector<IterationResult> results = engine_.TakeResults();
      TREADLE_RETURN_IF_ERROR(engine_.status());
      if (!results.empty()) {
        const IterationTimings& timings = results.front().timings;
        const double seconds = timings.receive + timings.compute + timings.sample;
        if (iterations_ > 1) {
          ++noted_;
          spent_ += seconds;
          cost_.Note(work, seconds);
        }
        for (const StepResult& step : results.front().steps) {
          const auto sequence = std::ranges::find(sequences_, step.sequence, &Sequence::id);
          if (sequence != sequences_.end()) sequence->sample = step.token();
        }
        return absl::OkStatus();
      }
      how_.wait(SteadyClock::now() + kPatience);  // the engine has a deadline for each iteration
    }
  }

  Engine& engine_;
  const Calibration& how_;
  IterationCost& cost_;
  KvSlotManager kv_;
  std::vector<Sequence> sequences_;  // of RunTokens
  std::vector<SequenceId> releases_;
  SequenceId next_sequence_ = SequenceId{1} << 62;  // requests' never come so far
  uint64_t iterations_ = 0, noted_ = 0;
  double spent_ = 0;
};

}  // namespace

absl::StatusOr<uint64_t> Calibrate(Engine& engine, const Calibration& how, IterationCost& cost) {
  return Run(engine, how, cost).All();
}

}  // namespace treadle
