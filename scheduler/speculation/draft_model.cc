#include "scheduler/speculation/draft_model.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "base/status.h"
#include "scheduler/speculation/ngram_drafter.h"

namespace treadle {
namespace {

constexpr double kLearning = 1.0 / 16;     // the weight of the newest guess
constexpr double kForgetting = 1.0 / 512;  // with each new sequence: one in a while tries again
constexpr std::array<double, 4> kConfidences = {0.3, 0.6, 0.8, 0.95};  // between kinds of guesses
constexpr auto kLook = std::chrono::seconds(1);  // after so long the engine says if it is late

size_t KindOf(double confidence) {
  return static_cast<size_t>(std::ranges::lower_bound(kConfidences, confidence) -
                             kConfidences.begin());
}

void Learn(double& share, bool right) { share += kLearning * ((right ? 1.0 : 0.0) - share); }

}  // namespace

class DraftModel::ModelDrafter final : public Drafter {
 public:
  ModelDrafter(DraftModel& model, const Request& request, const Sequence& sequence)
      : model_(model),
        repeats_(MakeNgramDrafter(request, sequence)),
        salt_(request.spec.cache_salt),
        tokens_(request.spec.text().begin(), request.spec.text().end()),
        promise_(model.promise_) {
    tokens_.insert(tokens_.end(), sequence.output.begin(), sequence.output.end());
    start_.prompt_length = static_cast<int32_t>(size() - std::ssize(sequence.output));
    start_.sampling = request.spec.sampling;
    start_.min_new_tokens = request.spec.min_new_tokens;
    start_.end_tokens = request.spec.end_tokens;
    start_.candidate = sequence.candidate;
    most_ = std::min<int64_t>(model.options_.context,
                              int64_t{start_.prompt_length} + request.spec.max_new_tokens);
  }
  ~ModelDrafter() override { model_.Release(*this); }

  void Append(int32_t token) override {
    if (!guesses_.empty()) {
      const bool right = guesses_.front().token == token;
      for (double* share :
           {&promise_, &model_.promise_, &model_.right_[KindOf(guesses_.front().confidence)]}) {
        Learn(*share, right);
      }
      guesses_.erase(guesses_.begin(), right ? guesses_.begin() + 1 : guesses_.end());
      if (!right) inputs_ = std::min(inputs_, size());
    }
    tokens_.push_back(token);
    repeats_->Append(token);
  }

  std::vector<Guess> Next(int32_t count) const override {
    if (guesses_.empty()) return repeats_->Next(count);
    std::vector<Guess> next;
    double probability = 1;
    for (const Own& guess :
         std::span(guesses_).first(std::min(guesses_.size(), static_cast<size_t>(count)))) {
      probability *= model_.right_[KindOf(guess.confidence)];
      next.push_back({guess.token, probability});
    }
    return next;
  }

  double Promise() const override {
    if (model_.failed_ || refused_ || size() >= most_) return 0;
    const std::vector<Guess> repeated = repeats_->Next(1);
    return !repeated.empty() && repeated[0].probability >= promise_ ? 0 : promise_;
  }

 private:
  friend class DraftModel;
  struct Own {
    int32_t token;
    double confidence;  // the model's probability of it
  };

  int64_t size() const { return std::ssize(tokens_); }
  KvSlotManager::Prefix Prefix(int64_t ids) const {
    return {salt_, std::span(tokens_).first(static_cast<size_t>(ids))};
  }

  DraftModel& model_;
  const std::unique_ptr<Drafter> repeats_;
  const std::string salt_;
  SequenceStart start_;          // sequence 0: it was not admitted
  int64_t most_;                 // positions
  bool refused_ = false;         // there was no room
  std::vector<int32_t> tokens_;  // that the sequence has
  std::vector<Own> guesses_;     // of what follows them
  int64_t inputs_ = 0;           // positions whose rows are right, if the guesses are
  int64_t written_ = 0;          // the end of all that was ever written
  double promise_;               // share of right guesses
};

DraftModel::DraftModel(std::unique_ptr<Engine> engine, const Options& options)
    : options_(options),
      engine_(std::move(engine)),
      kv_(options.pages, options.paging, /*most_idle=*/options.pages) {}

DraftModel::~DraftModel() = default;

absl::Status DraftModel::Start() {
  TREADLE_RETURN_IF_ERROR(engine_->Start([this] {
    MutexLock lock(mutex_);
    rung_ = true;
    news_.NotifyAll();
  }));
  return Measure();
}

// Iterations of one row and of several, by a sequence that nobody asked for.
absl::Status DraftModel::Measure() {
  const int64_t most = std::min({options_.context, options_.max_batch_tokens, int64_t{8}});
  const auto pages = kv_.Admit(1, most, 1);
  if (!pages)
    return InvalidArgument("the draft model's K/V cache has no room for ", most, " tokens");
  SequenceStart start;
  start.sequence = next_sequence_++;
  start.prompt_length = 1;
  start.pages = (*pages)[0];
  constexpr int kTimes = 4;  // the first one finds everything cold
  for (int time = 0; time < kTimes; ++time) {
    for (const int64_t rows : {int64_t{1}, most}) {
      IterationPlan plan;
      if (next_iteration_ == 0) plan.starts = {start};
      Step step{.sequence = start.sequence, .num_tokens = static_cast<int32_t>(rows)};
      step.tokens.assign(static_cast<size_t>(rows), 0);
      step.outputs = {{.row = step.num_tokens - 1, .sample = true}};
      plan.steps.push_back(std::move(step));
      const IterationWork work = WorkOf(plan);
      TREADLE_ASSIGN_OR_RETURN(const auto results, Run({std::move(plan)}));
      if (time > 0) NoteCost(work, results[0]);
    }
  }
  kv_.Release(start.pages);
  releases_.push_back(start.sequence);
  return absl::OkStatus();
}

void DraftModel::NoteCost(const IterationWork& work, const IterationResult& result) {
  cost_.Note(work, result.timings.compute + result.timings.sample);
}

std::unique_ptr<Drafter> DraftModel::Make(const Request& request, const Sequence& sequence) {
  promise_ += kForgetting * (1 - promise_);
  return std::make_unique<ModelDrafter>(*this, request, sequence);
}

// False: it has no place.
bool DraftModel::Admit(ModelDrafter& drafter, IterationPlan& plan) {
  SequenceStart& start = drafter.start_;
  if (start.sequence != 0 || drafter.refused_) return !drafter.refused_;
  const KvSlotManager::Prefix prompt = drafter.Prefix(start.prompt_length - 1);
  auto pages = kv_.Admit(start.prompt_length, drafter.most_, 1, prompt);
  drafter.refused_ = !pages.has_value();
  if (drafter.refused_) return false;
  start.sequence = next_sequence_++;
  start.pages = std::move((*pages)[0]);
  SequencePages* const table = &start.pages;
  start.first_position = kv_.ShareKept(prompt, std::span(&table, 1));
  drafter.inputs_ = start.first_position;
  const KvSlotManager::Prefix kept = drafter.Prefix(drafter.inputs_);
  kv_.AddPrefixCopies(kept, start.pages, plan);
  start.earlier_tokens.assign(kept.ids.begin(), kept.ids.end());
  plan.starts.push_back(start);
  start.earlier_tokens.clear();
  return true;
}

void DraftModel::Release(ModelDrafter& drafter) {
  const SequenceStart& start = drafter.start_;
  if (start.sequence == 0) return;
  releases_.push_back(start.sequence);
  kv_.KeepAndRelease(drafter.Prefix(std::min(drafter.inputs_, drafter.size())), start.pages,
                     {start.first_position, drafter.written_});
}

// A plan for each token ahead. `guessing`: the drafters of each plan's outputs, in order.
std::vector<IterationPlan> DraftModel::Plan(std::span<const Wanted> wanted, Guessing& guessing) {
  std::vector<IterationPlan> plans(1);
  plans[0].releases = std::exchange(releases_, {});
  guessing.resize(1);
  int64_t room = options_.max_batch_tokens;
  for (const auto& [asked, count] : wanted) {
    auto& drafter = static_cast<ModelDrafter&>(*asked);
    const int64_t known = drafter.size();
    drafter.guesses_.clear();
    drafter.inputs_ = std::min(drafter.inputs_, known - 1);
    if (known > drafter.most_ || room == 0 || !Admit(drafter, plans[0])) continue;
    const int64_t ahead = std::min<int64_t>(count, drafter.most_ - known + 1);
    for (int64_t i = 0; i < ahead; ++i) {
      Step step{.sequence = drafter.start_.sequence,
                .first_position = static_cast<int32_t>(drafter.inputs_),
                .num_tokens = 1};
      if (i == 0) {
        const auto inputs =
            std::span(drafter.tokens_).subspan(static_cast<size_t>(drafter.inputs_));
        step.num_tokens = static_cast<int32_t>(std::min(std::ssize(inputs), room));
        step.tokens.assign(inputs.begin(), inputs.begin() + step.num_tokens);
        room -= step.num_tokens;
      }  // else the token that is being sampled
      drafter.inputs_ += step.num_tokens;
      kv_.NoteWrites(drafter.start_.pages, step.first_position, drafter.inputs_);
      drafter.written_ = std::max(drafter.written_, drafter.inputs_);
      const bool behind = drafter.inputs_ < known;
      if (!behind) {
        step.outputs = {{.row = step.num_tokens - 1, .sample = true, .top_logprobs = 0}};
        guessing[static_cast<size_t>(i)].push_back(&drafter);
      }
      plans[static_cast<size_t>(i)].steps.push_back(std::move(step));
      if (behind) break;
      plans.resize(std::max(plans.size(), static_cast<size_t>(std::min(i + 2, ahead))));
      guessing.resize(plans.size());
    }
  }
  return plans;
}

void DraftModel::Draft(std::span<const Wanted> wanted) {
  if (failed_) return;
  Guessing guessing;
  std::vector<IterationPlan> plans = Plan(wanted, guessing);
  if (plans[0].steps.empty()) {
    releases_ = std::move(plans[0].releases);
    return;
  }
  std::vector<IterationWork> work;
  for (const IterationPlan& plan : plans) work.push_back(WorkOf(plan));
  const auto results = Run(std::move(plans));
  if (!results.ok()) {
    failed_ = true;
    for (const Wanted& one : wanted) static_cast<ModelDrafter&>(*one.drafter).guesses_.clear();
    if (options_.on_failure) options_.on_failure(results.status());
    return;
  }
  for (size_t i = 0; i < results->size(); ++i) {
    NoteCost(work[i], (*results)[i]);
    auto drafter = guessing[i].begin();
    for (const StepResult& step : (*results)[i].steps) {
      for (const RowResult& row : step.outputs) {
        (*drafter++)->guesses_.push_back({row.token, std::exp(double{row.detail.logprob})});
      }
    }
  }
}

// Runs the plans one after the other, as many at once as the engine takes.
absl::StatusOr<std::vector<IterationResult>> DraftModel::Run(std::vector<IterationPlan> plans) {
  std::vector<IterationResult> results;
  size_t submitted = 0;
  while (results.size() < plans.size()) {
    while (submitted < plans.size() && engine_->HasRoom()) {
      IterationPlan& plan = plans[submitted++];
      plan.epoch = engine_->epoch();
      plan.iteration = next_iteration_++;
      engine_->Submit(std::move(plan));
    }
    std::vector<IterationResult> taken = engine_->TakeResults();
    TREADLE_RETURN_IF_ERROR(engine_->status());
    if (taken.empty()) WaitForNews();
    std::ranges::move(taken, std::back_inserter(results));
  }
  return results;
}

void DraftModel::WaitForNews() {
  const auto look = std::chrono::steady_clock::now() + kLook;
  MutexLock lock(mutex_);
  while (!rung_ && news_.WaitUntil(mutex_, look)) {
  }
  rung_ = false;
}

}  // namespace treadle
