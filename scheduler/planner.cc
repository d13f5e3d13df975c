#include "scheduler/planner.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

// Further candidates share the prompt but for its last position.
int32_t FirstPosition(const Request& request, const Sequence& sequence) {
  return sequence.candidate > 0 ? request.prompt_length() - 1 : 0;
}

SequenceStart MakeStart(const Request& request, const Sequence& sequence) {
  SequenceStart start;
  start.sequence = sequence.id;
  start.prompt_length = request.prompt_length();
  start.first_position = sequence.next_position;
  start.pages = sequence.pages;
  start.sampling = request.spec.sampling;
  start.min_new_tokens = request.spec.min_new_tokens;
  start.end_tokens = request.spec.end_tokens;
  start.candidate = sequence.candidate;
  if (start.first_position > 0 && request.spec.sampling.NeedsCounts()) {
    const auto& prompt = request.spec.prompt;
    start.earlier_tokens.assign(prompt.begin(), prompt.begin() + start.first_position);
  }
  return start;
}

}  // namespace

void PlanInFlight::Clear() {
  steps.clear();
  requests.clear();
  members.clear();
  schedule = 0;
  idle = 0;
  behind = false;
}

IterationPlan Planner::Build(const Selection& selection, Clock::time_point now,
                             PlanInFlight& note) {
  IterationPlan plan;
  plan.releases = std::exchange(releases_, {});
  plan.steps.reserve(selection.size());
  note.requests.reserve(selection.size());
  note.members.reserve(selection.size());
  for (const Selected& member : selection) {
    Request& request = *member.request;
    if (request.state == RequestState::kWaiting) Admit(request, now);
    if (member.num_tokens == 0) continue;
    const bool initiation = InInitiation(request);
    if (plan.steps.empty()) plan.stages = StagesOf(request);
    if (plan.stages != StagesOf(request)) continue;
    if (request.sequences[0].next_position < request.prompt_length()) {
      AddPromptChunk(request, member.num_tokens, plan, note);
    } else if (initiation) {
      AddKnown(request, member.num_tokens, plan, note);
    } else {
      AddTokens(request, plan, note);
    }
    ++request.plans_in_flight;
    note.requests.push_back(&request);
    note.members.push_back({request.id, member.num_tokens, initiation});
  }
  return plan;
}

void Planner::Admit(Request& request, Clock::time_point now) {
  const int64_t prompt = request.prompt_length();
  auto pages = kv_.Admit(prompt, prompt + request.spec.max_new_tokens, request.spec.candidates);
  TREADLE_CHECK(pages.has_value());  // the policy saw to it
  for (Sequence& sequence : request.sequences) {
    sequence.id = next_sequence_++;
    sequence.pages = std::move((*pages)[sequence.candidate]);
    sequence.next_position = sequence.known = FirstPosition(request, sequence);
    if (sequence.produced > 0) sequence.known = request.prompt_length() + sequence.produced - 1;
  }
  request.missing = {};  // nobody has anything of it
  request.state = RequestState::kRunning;
  request.admitted = now;
}

void Planner::AddPromptChunk(Request& request, int32_t num_tokens, IterationPlan& plan,
                             PlanInFlight& note) const {
  Sequence& sequence = request.sequences[0];
  if (!std::exchange(sequence.started, true)) plan.starts.push_back(MakeStart(request, sequence));
  const std::vector<int32_t>& prompt = request.spec.prompt;
  const int32_t end = sequence.next_position + num_tokens;
  const bool whole = end == request.prompt_length();
  const bool again = sequence.next_position < sequence.known;

  Step step;
  step.sequence = sequence.id;
  step.first_position = sequence.next_position;
  step.num_tokens = num_tokens;
  step.tokens.assign(prompt.begin() + sequence.next_position, prompt.begin() + end);
  step.sample = whole && !sequence.finished && !again;
  step.pooling = request.spec.pooling;
  step.masked = step.sample && request.spec.constraint != nullptr;
  step.top_logprobs = step.sample ? request.spec.top_logprobs : -1;
  step.prompt_logprobs = again ? -1 : request.spec.prompt_logprobs;
  if (step.prompt_logprobs >= 0 && !whole) step.next_token = prompt[static_cast<size_t>(end)];

  sequence.next_position = end;
  if (step.sample) ++sequence.in_flight;
  note.steps.push_back({&request, sequence.candidate, step.sample, end});
  plan.steps.push_back(std::move(step));
}

// All candidates start before the first has run more than the prompt: they copy its pages.
void Planner::AddKnown(Request& request, int32_t num_tokens, IterationPlan& plan,
                       PlanInFlight& note) const {
  for (Sequence& sequence : request.sequences) {
    if (sequence.finished) continue;
    if (!sequence.started) StartCandidate(request, sequence, plan);
    const int32_t count = std::min(num_tokens, sequence.known - sequence.next_position);
    if (count <= 0) continue;
    Step step;
    step.sequence = sequence.id;
    step.first_position = sequence.next_position;
    step.num_tokens = count;
    const int32_t end = sequence.next_position + count;
    while (sequence.next_position < end) {
      step.tokens.push_back(request.InputAt(sequence, sequence.next_position++));
    }
    num_tokens -= count;
    note.steps.push_back({&request, sequence.candidate, false, end});
    plan.steps.push_back(std::move(step));
  }
}

void Planner::AddTokens(Request& request, IterationPlan& plan, PlanInFlight& note) const {
  for (Sequence& sequence : request.sequences) {
    if (!HasTokenLeft(request, sequence)) continue;
    Step step;
    step.sequence = sequence.id;
    step.first_position = sequence.next_position;
    step.num_tokens = 1;
    step.sample = true;
    step.masked = request.spec.constraint != nullptr;
    step.top_logprobs = request.spec.top_logprobs;
    if (!sequence.started) StartCandidate(request, sequence, plan);
    if (sequence.in_flight == 0) {
      step.tokens = {request.InputAt(sequence, sequence.next_position)};
    }  // else the token that is being sampled: the sequence's previous sample
    ++sequence.next_position;
    ++sequence.in_flight;
    note.steps.push_back({&request, sequence.candidate, true, sequence.next_position});
    plan.steps.push_back(std::move(step));
  }
}

void Planner::StartCandidate(const Request& request, Sequence& sequence,
                             IterationPlan& plan) const {
  kv_.AddCopies(request.sequences[0].pages, sequence.pages, request.prompt_length(), plan);
  plan.starts.push_back(MakeStart(request, sequence));
  sequence.started = true;
}

void Planner::Retire(Request& request) {
  TREADLE_CHECK(request.state == RequestState::kFinished && request.plans_in_flight == 0);
  for (Sequence& sequence : request.sequences) {
    if (sequence.started) releases_.push_back(sequence.id);
    kv_.Release(std::exchange(sequence.pages, {}));
    sequence.started = false;
  }
}

void Planner::NoteLost(Request& request, const StageRange& lost, int64_t replay_pages) const {
  const bool logged = std::ranges::all_of(request.sequences, [&](const Sequence& sequence) {
    const std::vector<int32_t>& pages = sequence.pages.whole;
    return !pages.empty() && std::ranges::max(pages) < replay_pages;
  });
  request.missing = request.missing.Around(lost);
  if (!logged && !request.missing.empty()) request.missing.begin = 0;
  // What was pooled so far went with the last stage's sequences.
  if (request.spec.pooling != Pooling::kNone) request.missing = {};
}

void Planner::Restart(Request& request) {
  TREADLE_CHECK(request.state == RequestState::kRunning && request.plans_in_flight == 0);
  for (Sequence& sequence : request.sequences) {
    sequence.id = next_sequence_++;
    sequence.next_position = FirstPosition(request, sequence);
    sequence.in_flight = 0;
    sequence.started = false;
    sequence.masked.reset();  // what it was given may be ahead
    sequence.unordered.clear();
  }
}

void Planner::Reset() {
  releases_.clear();
  kv_.Reset();
}

}  // namespace treadle
