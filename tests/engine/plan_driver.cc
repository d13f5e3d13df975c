#include "tests/engine/plan_driver.h"

#include <algorithm>

namespace treadle {

PlanDriver::PlanDriver(const Options& options, std::vector<DrivenRequest> requests)
    : options_(options),
      requests_(std::move(requests)),
      random_(options.seed),
      kv_(options.num_pages, options.paging) {}

bool PlanDriver::Done() const {
  return next_request_ == requests_.size() &&
         std::all_of(sequences_.begin(), sequences_.end(),
                     [](const Sequence& sequence) { return sequence.released; });
}

// Reserves for all candidates.
bool PlanDriver::Admit(size_t index) {
  const DrivenRequest& driven = requests_[index];
  const int64_t prompt = static_cast<int64_t>(driven.request.prompt.size());
  auto pages = kv_.Admit(prompt, prompt + driven.request.max_new_tokens, driven.candidates);
  if (!pages) return false;
  for (int32_t candidate = 0; candidate < driven.candidates; ++candidate) {
    Sequence sequence;
    sequence.id = sequences_.size() + 1;
    sequence.request = index;
    sequence.candidate = static_cast<uint32_t>(candidate);
    sequence.pages = std::move((*pages)[candidate]);
    sequences_.push_back(std::move(sequence));
  }
  return true;
}

void PlanDriver::AddStart(Sequence& sequence, int32_t first_position, IterationPlan& plan) {
  const AloneRequest& request = RequestOf(sequence);
  SequenceStart start;
  start.sequence = sequence.id;
  start.prompt_length = static_cast<int32_t>(request.prompt.size());
  start.first_position = first_position;
  start.pages = sequence.pages;
  start.sampling = request.sampling;
  start.min_new_tokens = request.min_new_tokens;
  start.end_tokens = request.end_tokens;
  start.candidate = sequence.candidate;
  if (first_position > 0 && request.sampling.NeedsCounts()) {
    start.earlier_tokens.assign(request.prompt.begin(), request.prompt.begin() + first_position);
  }
  sequence.started = true;
  sequence.next_position = first_position;
  plan.starts.push_back(std::move(start));
}

// Candidates 1 and up begin once a plan has run the prompt: copies of pages, one row again.
void PlanDriver::StartCandidates(IterationPlan& plan) {
  for (Sequence& sequence : sequences_) {
    if (sequence.started) continue;
    const int32_t prompt = static_cast<int32_t>(RequestOf(sequence).prompt.size());
    if (sequence.candidate == 0) {
      AddStart(sequence, 0, plan);
      continue;
    }
    const Sequence& first = sequences_[sequence.id - 1 - sequence.candidate];
    if (first.next_position < prompt) continue;
    kv_.AddCopies(first.pages, sequence.pages, prompt, plan);
    AddStart(sequence, prompt - 1, plan);
  }
}

void PlanDriver::AddStep(Sequence& sequence, int64_t budget, IterationPlan& plan) {
  const AloneRequest& request = RequestOf(sequence);
  const int32_t prompt = static_cast<int32_t>(request.prompt.size());
  Step step;
  step.sequence = sequence.id;
  if (sequence.next_position < prompt) {
    const int32_t floor = sequence.candidate == 0 ? 0 : prompt - 1;
    if (request.prompt_logprobs < 0 && random_() % 8 == 0) {  // run a piece again
      sequence.next_position = std::max(floor, sequence.next_position - 3);
    }
    const int32_t left = prompt - sequence.next_position;
    const int32_t most = static_cast<int32_t>(std::min<int64_t>(budget, left));
    step.num_tokens = random_() % 3 == 0 ? most : static_cast<int32_t>(1 + random_() % most);
    const auto begin = request.prompt.begin() + sequence.next_position;
    step.tokens.assign(begin, begin + step.num_tokens);
    if (sequence.candidate == 0) step.prompt_logprobs = request.prompt_logprobs;
    const int32_t next = sequence.next_position + step.num_tokens;
    if (next < prompt) step.next_token = request.prompt[next];
  } else {
    step.num_tokens = 1;
    const std::vector<int32_t>& known = sequence.answer.tokens;
    const size_t wanted = static_cast<size_t>(sequence.next_position - prompt);
    const bool carry =
        (random_() % 2 == 0 || options_.one_plan_each) && !options_.always_previous_sample;
    if (carry && wanted < known.size()) step.tokens = {known[wanted]};
  }
  step.first_position = sequence.next_position;
  sequence.next_position += step.num_tokens;
  if (sequence.next_position >= prompt) {
    step.sample = true;
    step.top_logprobs = request.top_logprobs;
    ++sequence.submitted;
  }
  ++sequence.in_flight;
  plan.steps.push_back(std::move(step));
}

IterationPlan PlanDriver::Next(uint64_t epoch, uint64_t iteration) {
  IterationPlan plan;
  plan.epoch = epoch;
  plan.iteration = iteration;
  for (Sequence& sequence : sequences_) {
    const bool complete = sequence.submitted == RequestOf(sequence).max_new_tokens;
    if (sequence.released || !(complete || sequence.ended) || sequence.in_flight > 0) continue;
    // Candidates copy the first one's page: it stays until they have begun.
    const size_t next = static_cast<size_t>(sequence.id);
    if (next < sequences_.size() && sequences_[next].candidate > 0 && !sequences_[next].started) {
      continue;
    }
    sequence.released = true;
    plan.releases.push_back(sequence.id);
    kv_.Release(sequence.pages);
  }
  while (next_request_ < requests_.size() && random_() % 3 != 0 && Admit(next_request_)) {
    ++next_request_;
  }
  StartCandidates(plan);

  std::vector<Sequence*> order;
  for (Sequence& sequence : sequences_) {
    const bool complete = sequence.submitted == RequestOf(sequence).max_new_tokens;
    const bool busy = options_.one_plan_each && sequence.in_flight > 0;
    if (sequence.started && !sequence.released && !complete && !sequence.ended && !busy) {
      order.push_back(&sequence);
    }
  }
  std::shuffle(order.begin(), order.end(), random_);
  for (Sequence* sequence : order) {
    const int64_t budget = options_.max_batch_tokens - plan.num_tokens();
    if (budget > 0 && random_() % 5 != 0) AddStep(*sequence, budget, plan);
  }
  return plan;
}

void PlanDriver::Absorb(const IterationResult& result) {
  for (const StepResult& step : result.steps) {
    Sequence& sequence = sequences_.at(step.sequence - 1);
    const AloneRequest& request = RequestOf(sequence);
    AloneAnswer& answer = sequence.answer;
    --sequence.in_flight;
    answer.prompt_details.insert(answer.prompt_details.end(), step.prompt_detail.begin(),
                                 step.prompt_detail.end());
    if (step.token < 0 || sequence.ended) continue;
    answer.tokens.push_back(step.token);
    if (request.top_logprobs >= 0) answer.details.push_back(step.detail);
    const auto& ends = request.end_tokens;
    sequence.ended = std::find(ends.begin(), ends.end(), step.token) != ends.end();
  }
}

const AloneAnswer& PlanDriver::answer(size_t request, uint32_t candidate) const {
  for (const Sequence& sequence : sequences_) {
    if (sequence.request == request && sequence.candidate == candidate) return sequence.answer;
  }
  TREADLE_CHECK(false);
}

}  // namespace treadle
