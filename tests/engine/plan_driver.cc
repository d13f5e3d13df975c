#include "tests/engine/plan_driver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

namespace treadle {
namespace {

// Requests of one adapter share what is cached, as in the server.
std::string SaltOf(const AloneRequest& request) {
  return request.adapter == 0 ? std::string() : std::to_string(request.adapter);
}

}  // namespace

PlanDriver::PlanDriver(const Options& options, std::vector<DrivenRequest> requests)
    : options_(options),
      requests_(std::move(requests)),
      random_(options.seed),
      kv_(options.num_pages, options.paging, options.num_pages) {}

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
  start.adapter = request.adapter;
  start.earlier_tokens.assign(request.prompt.begin(), request.prompt.begin() + first_position);
  sequence.started = true;
  sequence.next_position = sequence.begun = sequence.written = first_position;
  plan.starts.push_back(std::move(start));
}

// Candidates 1 and up begin once a plan has run the prompt: copies of pages, one row again.
void PlanDriver::StartCandidates(IterationPlan& plan) {
  for (Sequence& sequence : sequences_) {
    if (sequence.started) continue;
    const int32_t prompt = static_cast<int32_t>(RequestOf(sequence).prompt.size());
    if (sequence.candidate == 0) {
      AddStart(sequence, Reuse(sequence, plan), plan);
      continue;
    }
    const Sequence& first = sequences_[sequence.id - 1 - sequence.candidate];
    if (first.next_position < prompt) continue;
    kv_.AddCopies(first.pages, sequence.pages, prompt, plan);
    AddStart(sequence, prompt - 1, plan);
  }
}

// Takes what sequences before have left of the prompt.
int32_t PlanDriver::Reuse(Sequence& first, IterationPlan& plan) {
  const AloneRequest& request = RequestOf(first);
  if (request.prompt_logprobs >= 0 || random_() % 4 == 0) return 0;
  std::vector<SequencePages*> tables;
  for (int32_t i = 0; i < requests_[first.request].candidates; ++i) {
    tables.push_back(&sequences_[first.id - 1 + static_cast<size_t>(i)].pages);
  }
  const std::span<const int32_t> prompt = request.prompt;
  const std::string salt = SaltOf(request);
  const int32_t reused =
      kv_.ShareKept({salt, prompt.first(prompt.size() - 1), request.adapter}, tables);
  kv_.AddPrefixCopies({salt, prompt.first(reused), request.adapter}, first.pages, plan);
  reused_ += reused;
  return reused;
}

// Positions that the plan computes of prompts are there for the plans after it.
void PlanDriver::Keep(const IterationPlan& plan) {
  for (const Step& step : plan.steps) {
    const Sequence& sequence = sequences_.at(step.sequence - 1);
    const std::span<const int32_t> prompt = RequestOf(sequence).prompt;
    const auto end = std::min(static_cast<size_t>(sequence.next_position), prompt.size() - 1);
    if (sequence.candidate > 0) continue;
    const AloneRequest& request = RequestOf(sequence);
    const std::string salt = SaltOf(request);
    kv_.Keep({salt, prompt.first(end), request.adapter}, sequence.pages,
             {sequence.begun, sequence.written});
  }
}

// As where prompts part, wherever a page ends.
void PlanDriver::KeepCopies(const Sequence& sequence, IterationPlan& plan) {
  const auto next = static_cast<size_t>(sequence.next_position);
  if (next == 0 || next % options_.paging.page_size != 0 || random_() % 2 == 0) return;
  const AloneRequest& request = RequestOf(sequence);
  const std::string salt = SaltOf(request);
  const std::span<const int32_t> before = std::span(request.prompt).first(next);
  kv_.KeepCopies({salt, before, request.adapter}, sequence.pages, plan);
}

void PlanDriver::AddStep(Sequence& sequence, int64_t budget, IterationPlan& plan) {
  const AloneRequest& request = RequestOf(sequence);
  const int32_t prompt = static_cast<int32_t>(request.prompt.size());
  Step step;
  step.sequence = sequence.id;
  if (sequence.next_position < prompt) {
    const int32_t floor = sequence.begun;
    if (request.prompt_logprobs < 0 && random_() % 8 == 0) {  // run a piece again
      sequence.next_position = std::max(floor, sequence.next_position - 3);
    }
    if (sequence.candidate == 0) KeepCopies(sequence, plan);
    const int32_t left = prompt - sequence.next_position;
    const int32_t most = static_cast<int32_t>(std::min<int64_t>(budget, left));
    step.num_tokens = random_() % 3 == 0 ? most : static_cast<int32_t>(1 + random_() % most);
    const auto begin = request.prompt.begin() + sequence.next_position;
    step.tokens.assign(begin, begin + step.num_tokens);
    for (int32_t row = 0; request.prompt_logprobs >= 0 && row < step.num_tokens; ++row) {
      const int32_t next = sequence.next_position + row + 1;
      if (sequence.candidate > 0 || next == prompt) break;
      step.outputs.push_back(
          {.row = row, .target = request.prompt[next], .target_logprobs = request.prompt_logprobs});
    }
  } else {
    step.num_tokens = 1;
    const std::vector<int32_t>& known = sequence.answer.tokens;
    const size_t wanted = static_cast<size_t>(sequence.next_position - prompt);
    const bool carry = (random_() % 2 == 0 || options_.one_plan_each || sequence.strayed) &&
                       !options_.always_previous_sample;
    sequence.strayed = false;
    if (carry && wanted < known.size()) step.tokens = {known[wanted]};
    if (requests_[sequence.request].guesses && !step.tokens.empty() && sequence.in_flight == 0 &&
        random_() % 3 == 0) {
      Guess(sequence, budget, step);
    }
  }
  step.first_position = sequence.next_position;
  sequence.next_position += step.num_tokens;
  sequence.written = std::max(sequence.written, sequence.next_position);
  kv_.NoteWrites(sequence.pages, step.first_position, sequence.next_position);
  const int32_t first_sampled = sequence.guessed.empty() ? step.num_tokens - 1 : 0;
  for (int32_t row = first_sampled; row < step.num_tokens; ++row) {
    if (sequence.next_position < prompt) break;
    step.outputs.push_back({.row = row, .sample = true, .top_logprobs = request.top_logprobs});
  }
  if (sequence.next_position >= prompt) ++sequence.submitted;
  ++sequence.in_flight;
  plan.steps.push_back(std::move(step));
}

// Up to three tokens that are known, and up to three that nobody knows.
void PlanDriver::Guess(Sequence& sequence, int64_t budget, Step& step) {
  const AloneRequest& request = RequestOf(sequence);
  const auto prompt = static_cast<int32_t>(request.prompt.size());
  const int32_t least = std::max(prompt, sequence.next_position - 3);
  const int32_t first =
      least + static_cast<int32_t>(random_() % (sequence.next_position - least + 1));
  const int32_t last = prompt + request.max_new_tokens - 2;  // whose sample is the last token
  int32_t guesses = std::min(last - sequence.next_position, static_cast<int32_t>(random_() % 4));
  const std::vector<int32_t>& known = sequence.answer.tokens;
  step.tokens.assign(known.begin() + (first - prompt), known.end());
  for (; guesses > 0; --guesses) step.tokens.push_back(request.prompt[random_() % prompt]);
  if (std::ssize(step.tokens) > budget) return step.tokens.assign(1, known.back());
  sequence.next_position = first;
  step.num_tokens = static_cast<int32_t>(step.tokens.size());
  sequence.guessed = step.tokens;
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
    // The last token's row may not have been run.
    const AloneRequest& request = RequestOf(sequence);
    std::vector<int32_t> ids = request.prompt;
    ids.insert(ids.end(), sequence.answer.tokens.begin(), sequence.answer.tokens.end());
    if (!sequence.answer.tokens.empty()) ids.pop_back();
    ids.resize(std::min(ids.size(), static_cast<size_t>(sequence.next_position)));
    const std::string salt = SaltOf(request);
    kv_.KeepAndRelease({salt, ids, request.adapter}, sequence.pages,
                       {sequence.begun, sequence.written});
  }
  while (next_request_ < requests_.size() && random_() % 3 != 0 && Admit(next_request_)) {
    ++next_request_;
  }
  StartCandidates(plan);

  std::vector<Sequence*> order;
  for (Sequence& sequence : sequences_) {
    const bool complete = sequence.submitted == RequestOf(sequence).max_new_tokens;
    const bool busy =
        (options_.one_plan_each || !sequence.guessed.empty()) && sequence.in_flight > 0;
    if (sequence.started && !sequence.released && !complete && !sequence.ended && !busy) {
      order.push_back(&sequence);
    }
  }
  std::shuffle(order.begin(), order.end(), random_);
  for (Sequence* sequence : order) {
    const int64_t budget = options_.max_batch_tokens - plan.num_tokens();
    if (budget > 0 && random_() % 5 != 0) AddStep(*sequence, budget, plan);
  }
  Keep(plan);
  return plan;
}

void PlanDriver::Absorb(const IterationResult& result) {
  for (const StepResult& step : result.steps) {
    Sequence& sequence = sequences_.at(step.sequence - 1);
    const auto prompt = static_cast<int32_t>(RequestOf(sequence).prompt.size());
    std::vector<int32_t>& tokens = sequence.answer.tokens;
    --sequence.in_flight;
    const std::vector<int32_t> guessed = std::exchange(sequence.guessed, {});
    const int32_t first = sequence.next_position - static_cast<int32_t>(guessed.size());
    for (size_t i = 0; i < step.outputs.size() && !sequence.ended; ++i) {
      const RowResult& row = step.outputs[i];
      if (row.token < 0) {
        sequence.answer.prompt_details.push_back(row.target);
        continue;
      }
      const size_t index = guessed.empty() ? tokens.size() : first + i + 1 - prompt;
      if (index < tokens.size()) {
        EXPECT_EQ(row.token, tokens[index]) << "sampled again";
      } else {
        AbsorbToken(sequence, row);
      }
      // The next step was computed after another token.
      if (i + 1 < guessed.size() && guessed[i + 1] != tokens[index]) break;
    }
    if (guessed.empty()) continue;
    sequence.strayed = true;
    sequence.next_position = prompt + static_cast<int32_t>(tokens.size()) - 1;
    sequence.submitted = static_cast<int32_t>(tokens.size());
  }
}

void PlanDriver::AbsorbToken(Sequence& sequence, const RowResult& row) {
  const AloneRequest& request = RequestOf(sequence);
  sequence.answer.tokens.push_back(row.token);
  if (request.top_logprobs >= 0) sequence.answer.details.push_back(row.detail);
  sequence.ended = std::ranges::count(request.end_tokens, row.token) > 0;
}

const AloneAnswer& PlanDriver::answer(size_t request, uint32_t candidate) const {
  for (const Sequence& sequence : sequences_) {
    if (sequence.request == request && sequence.candidate == candidate) return sequence.answer;
  }
  TREADLE_CHECK(false);
}

}  // namespace treadle
