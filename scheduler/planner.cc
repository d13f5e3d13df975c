#include "scheduler/planner.h"

#include <algorithm>
#include <utility>

#include "base/status.h"
#include "scheduler/request/page_fetches.h"

namespace treadle {
namespace {

// At its next position.
void Start(const Request& request, Sequence& sequence, IterationPlan& plan) {
  sequence.started = true;
  sequence.begun = std::max(sequence.begun, sequence.next_position);
  SequenceStart& start = plan.starts.emplace_back();
  start.sequence = sequence.id;
  start.prompt_length = request.prompt_length();
  start.first_position = sequence.next_position;
  start.pages = sequence.pages;
  start.sampling = request.spec.sampling;
  start.min_new_tokens = request.spec.min_new_tokens;
  start.end_tokens = request.spec.end_tokens;
  start.candidate = sequence.candidate;
  start.adapter = request.spec.adapter;
  const auto& prompt = request.spec.prompt;
  start.earlier_tokens.assign(prompt.begin(), prompt.begin() + start.first_position);
  start.mean_pooling = request.spec.pooling == Pooling::kMean;
}

// The output that a request wants after its prompt's last row, and after each token: the next one,
// or, where it is pooled, the row's state or the mean of all.
RowOutput SampleAt(const Request& request, int32_t row) {
  const bool pooled = request.spec.pooling != Pooling::kNone;
  return {.row = row,
          .sample = !pooled,
          .masked = request.spec.constraint != nullptr,
          .hidden = pooled,
          .top_logprobs = pooled ? -1 : request.spec.top_logprobs};
}

KvSlotManager::Prefix PrefixOf(const Request& request, std::span<const int32_t> ids) {
  return {request.spec.cache_salt, ids, request.spec.adapter};
}

// The number of tokens at the beginning of both prompts that one may have of the other's cache.
int32_t InCommon(const Request& a, const Request& b) {
  if (a.spec.cache_salt != b.spec.cache_salt || a.spec.adapter != b.spec.adapter) return 0;
  const std::span<const int32_t> ids = ReusableInputs(a);
  const auto end = std::ranges::mismatch(ids, ReusableInputs(b)).in1;
  return static_cast<int32_t>(end - ids.begin());
}

std::vector<SequencePages*> TablesOf(Request& request) {
  std::vector<SequencePages*> tables;
  for (Sequence& sequence : request.sequences) tables.push_back(&sequence.pages);
  return tables;
}

}  // namespace

void PlanInFlight::Clear() {
  steps.clear();
  requests.clear();
  members.clear();
  stores.clear();
  copies.clear();
  admitted = begun = padding = 0;
  work = 0;
  schedule = 0;
  idle = 0;
  behind = false;
}

IterationPlan Planner::Build(const Selection& selection, Clock::time_point now,
                             PlanInFlight& note) {
  IterationPlan plan;
  plan.releases = std::exchange(releases_, {});
  note.stores = kv_.AddStores(plan);
  written_.clear();
  bool waits = false;  // some member for copies, and who begins after it, so as not to overtake it
  plan.steps.reserve(selection.size());
  note.requests.reserve(selection.size());
  note.members.reserve(selection.size());
  for (const Selected& member : selection) {
    Request& request = *member.request;
    if (request.state == RequestState::kWaiting) {
      Admit(request);
      ++note.admitted;
    }
    if (member.num_tokens == 0) continue;
    if (IsToBegin(request)) {
      waits = waits || WaitsForCopies(request);
      if (waits) continue;
      Bind(request);
    }
    const bool initiation = InInitiation(request);
    if (plan.steps.empty()) plan.stages = StagesOf(request);
    if (plan.stages != StagesOf(request)) continue;
    const Sequence& first = request.sequences[0];
    int32_t num_tokens = member.num_tokens;
    if (first.next_position < request.prompt_length() && !first.sits_out) {
      num_tokens = Writable(request, std::min(num_tokens, InputsLeft(request)));
      if (num_tokens == 0) continue;
      num_tokens = UpToBranch(request, num_tokens, selection);
      AddPromptChunk(request, num_tokens, plan, note);
    } else if (initiation) {
      AddKnown(request, member.num_tokens, plan, note);
    } else {
      num_tokens = AddTokens(request, plan, note);
    }
    if (request.begun == Clock::time_point()) {
      request.begun = now;
      ++note.begun;
    }
    ++request.plans_in_flight;
    note.requests.push_back(&request);
    note.members.push_back({request.id, num_tokens, initiation});
  }
  KeepChunks(plan);
  return plan;
}

void Planner::ReservePadding(int64_t rows) {
  auto pages = kv_.Admit(rows, rows, 1);
  TREADLE_CHECK(pages.has_value());
  padding_ = std::move(pages->front());
}

void Planner::AddPadding(int64_t rows, IterationPlan& plan) {
  if (rows <= 0 || plan.stages != StageRange()) return;
  SequenceStart start;
  start.sequence = next_sequence_++;
  start.pages = padding_;
  start.prompt_length = static_cast<int32_t>(rows);
  plan.steps.push_back({.sequence = start.sequence,
                        .num_tokens = start.prompt_length,
                        .tokens = std::vector<int32_t>(static_cast<size_t>(rows))});
  releases_.push_back(start.sequence);
  plan.starts.push_back(std::move(start));
}

// Keeps what the plan has computed of prompts, now that it is whole: none of its steps may read
// what another one writes. The last row's page is not among it, which a request runs again that
// restarts.
void Planner::KeepChunks(const IterationPlan& plan) {
  const std::vector<const Request*> chunked = std::exchange(chunked_, {});
  // On stages that only take note of a plan, a ring holds what was known before.
  if (plan.stages != StageRange() && kv_.Capacity().paging.ring > 0) return;
  for (const Request* const request : chunked) {
    const Sequence& first = request->sequences[0];
    const int32_t end = std::min(first.next_position, request->prompt_length() - 1);
    kv_.Keep(PrefixOf(*request, std::span(request->spec.prompt).first(end)), first.pages,
             {first.begun, first.written});
  }
}

KvSlotManager::Found Planner::Cached(const Request& request) const {
  KvSlotManager::Found found = kv_.Find(PrefixOf(request, ReusableInputs(request)));
  found.tokens = WithFetched(request, found.tokens, kv_.Capacity().paging.page_size);
  return found;
}

// Has the request share what the cache has of its prompt by now. What was read for it comes after.
void Planner::Bind(Request& request) {
  const int32_t kept = kv_.ShareKept(PrefixOf(request, ReusableInputs(request)), TablesOf(request));
  const int64_t page_size = kv_.Capacity().paging.page_size;
  request.pages_kept = static_cast<size_t>(kept / page_size);
  NoteReused(request, WithFetched(request, kept, page_size));
}

// The pages that were read and that the cache does not have.
void Planner::AddLoads(Request& request, IterationPlan& plan) const {
  std::vector<PageBytes> fetched = std::exchange(request.fetched, {});
  request.pages_asked = 0;
  const Sequence& first = request.sequences[0];
  const auto end = static_cast<size_t>(first.next_position / kv_.Capacity().paging.page_size);
  for (size_t i = request.pages_kept; i < end; ++i) {
    plan.page_loads.push_back(
        {first.id, static_cast<int32_t>(i), std::move(fetched[i - request.first_fetched])});
  }
  if (end > request.pages_kept) kv_.files()->NoteHits(end - request.pages_kept);
}

// How many of the next `num_tokens` inputs of a prompt the plan can have: up to a page that another
// of its steps writes, too. After a restart, requests that share pages may all have to run what
// they hold; the second one finds it in the cache then, or writes the same rows once more.
int32_t Planner::Writable(const Request& request, int32_t num_tokens) {
  const int64_t page_size = kv_.Capacity().paging.page_size;
  const Sequence& first = request.sequences[0];
  const std::vector<int32_t>& pages = first.pages[PageKind::kWhole];
  const int64_t end = first.next_position + num_tokens;
  for (int64_t i = first.next_position / page_size; i * page_size < end && !pages.empty(); ++i) {
    if (kv_.references(pages[i]) == 1 || written_.insert(pages[i]).second) continue;
    return static_cast<int32_t>(std::max<int64_t>(0, i * page_size - first.next_position));
  }
  return num_tokens;
}

// How many of the next `num_tokens` inputs of a prompt come before its last branch, if it is among
// them. On stages that only take note of a plan, a ring holds what was known before.
int32_t Planner::UpToBranch(Request& request, int32_t num_tokens,
                            const Selection& selection) const {
  const KvPaging paging = kv_.Capacity().paging;
  if (paging.ring == 0 || StagesOf(request) != StageRange()) return num_tokens;
  const auto page_size = static_cast<int32_t>(paging.page_size);
  int32_t branch = kv_.BranchOf(PrefixOf(request, ReusableInputs(request)));
  for (const Selected& member : selection) {
    if (member.request == &request || !IsToBegin(*member.request)) continue;
    const int32_t common = InCommon(request, *member.request);
    branch = std::max(branch, common - common % page_size);
  }
  Sequence& first = request.sequences[0];
  const int32_t spared = branch - request.cached_tokens.value_or(first.next_position);
  if (branch <= first.next_position || branch > first.next_position + num_tokens ||
      spared < kLeastSpared * page_size || !kv_.HasRoomForCopies(branch)) {
    return num_tokens;
  }
  first.branch = branch;
  return branch - first.next_position;
}

// A member of the plan ends a chunk where the next plan has copies made, for this request as well.
bool Planner::WaitsForCopies(const Request& request) const {
  return std::ranges::any_of(chunked_, [&](const Request* other) {
    const Sequence& first = other->sequences[0];
    return first.branch > 0 && first.branch == first.next_position &&
           InCommon(request, *other) >= first.branch;
  });
}

void Planner::Admit(Request& request) {
  const int64_t prompt = request.prompt_length();
  auto pages = kv_.Admit(prompt, prompt + request.spec.max_new_tokens, request.spec.candidates,
                         PrefixOf(request, ReusableInputs(request)));
  TREADLE_CHECK(pages.has_value());  // the policy saw to it
  for (Sequence& sequence : request.sequences) {
    sequence.id = next_sequence_++;
    sequence.pages = std::move((*pages)[sequence.candidate]);
  }
  BeginProgress(request);
  request.state = RequestState::kRunning;
}

void Planner::AddPromptChunk(Request& request, int32_t num_tokens, IterationPlan& plan,
                             PlanInFlight& note) {
  Sequence& sequence = request.sequences[0];
  if (!sequence.started) {
    const auto reused = std::span(request.spec.prompt).first(sequence.next_position);
    kv_.AddPrefixCopies(PrefixOf(request, reused), sequence.pages, plan);
    Start(request, sequence, plan);
    AddLoads(request, plan);
    if (!request.cached_tokens) {
      request.cached_tokens = sequence.next_position;
      request.stream->NoteCached(sequence.next_position);
    }
  }
  const std::vector<int32_t>& prompt = request.spec.prompt;
  const int32_t end = sequence.next_position + num_tokens;
  const bool whole = end == request.prompt_length();
  const bool again = sequence.next_position < sequence.known;

  Step step;
  step.sequence = sequence.id;
  step.first_position = sequence.next_position;
  step.num_tokens = num_tokens;
  step.tokens.assign(prompt.begin() + sequence.next_position, prompt.begin() + end);
  const bool sample = whole && !sequence.finished && !again;
  const bool scored = request.spec.prompt_logprobs >= 0 && !again;
  const int32_t last = scored ? std::min(end, request.prompt_length() - 1) : 0;
  const int32_t first = std::max(sequence.next_position, request.spec.virtual_tokens);
  for (int32_t next = first + 1; next <= last; ++next) {
    step.outputs.push_back({.row = next - sequence.next_position - 1,
                            .target = prompt[static_cast<size_t>(next)],
                            .target_logprobs = request.spec.prompt_logprobs});
  }
  if (sample) step.outputs.push_back(SampleAt(request, num_tokens - 1));
  if (sequence.branch > 0 && sequence.branch == sequence.next_position) {
    const auto before = std::span(prompt).first(static_cast<size_t>(sequence.branch));
    const std::vector<int32_t> copies =
        kv_.KeepCopies(PrefixOf(request, before), sequence.pages, plan);
    note.copies.insert(note.copies.end(), copies.begin(), copies.end());
  }
  NoteWrites(sequence, end);
  chunked_.push_back(&request);
  sequence.next_position = end;
  if (sample) ++sequence.in_flight;
  note.steps.push_back({&request, sequence.candidate, sample ? 1 : 0, end});
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
    NoteWrites(sequence, end);
    while (sequence.next_position < end) {
      step.tokens.push_back(request.InputAt(sequence, sequence.next_position++));
    }
    num_tokens -= count;
    note.steps.push_back({&request, sequence.candidate, 0, end});
    plan.steps.push_back(std::move(step));
  }
}

// Gives the number of rows.
int32_t Planner::AddTokens(Request& request, IterationPlan& plan, PlanInFlight& note) const {
  int32_t num_tokens = 0;
  for (Sequence& sequence : request.sequences) {
    if (!HasTokenLeft(request, sequence)) continue;
    Step step;
    step.sequence = sequence.id;
    step.first_position = sequence.next_position;
    if (!sequence.started) StartCandidate(request, sequence, plan);
    step.num_tokens = 1 + static_cast<int32_t>(sequence.draft.size());
    if (sequence.in_flight == 0) {
      step.tokens = {request.InputAt(sequence, sequence.next_position)};
      step.tokens.insert(step.tokens.end(), sequence.draft.begin(), sequence.draft.end());
    }  // else the token that is being sampled: the sequence's previous sample
    for (int32_t row = 0; row < step.num_tokens; ++row) {
      step.outputs.push_back(SampleAt(request, row));
    }
    const int32_t end = sequence.next_position + step.num_tokens;
    NoteWrites(sequence, end);
    sequence.next_position = end;
    sequence.in_flight += step.num_tokens;
    num_tokens += step.num_tokens;
    note.steps.push_back({&request, sequence.candidate, step.num_tokens, end});
    plan.steps.push_back(std::move(step));
  }
  return num_tokens;
}

void Planner::StartCandidate(const Request& request, Sequence& sequence,
                             IterationPlan& plan) const {
  kv_.AddCopies(request.sequences[0].pages, sequence.pages, request.prompt_length(), plan);
  Start(request, sequence, plan);
}

// A step writes from the sequence's next position to before `end`.
void Planner::NoteWrites(Sequence& sequence, int32_t end) const {
  kv_.NoteWrites(sequence.pages, sequence.next_position, end);
  sequence.written = std::max(sequence.written, end);
}

void Planner::Retire(Request& request) {
  TREADLE_CHECK(request.state == RequestState::kFinished && request.plans_in_flight == 0);
  for (Sequence& sequence : request.sequences) {
    const SequencePages pages = std::exchange(sequence.pages, {});
    if (!std::exchange(sequence.started, false)) {
      kv_.Release(pages);
      continue;
    }
    releases_.push_back(sequence.id);
    std::vector<int32_t> ids = request.spec.prompt;
    ids.insert(ids.end(), sequence.output.begin(), sequence.output.end());
    ids.resize(HeldInputs(request, sequence));
    kv_.KeepAndRelease(PrefixOf(request, ids), pages, {sequence.begun, sequence.written});
  }
}

void Planner::NoteLost(const Request& request) {
  for (const Sequence& sequence : request.sequences) {
    kv_.Forget(sequence.pages, HeldInputs(request, sequence));
  }
}

void Planner::Restart(Request& request) {
  TREADLE_CHECK(request.state == RequestState::kRunning && request.plans_in_flight == 0);
  for (Sequence& sequence : request.sequences) sequence.id = next_sequence_++;
  Rewind(request);
}

void Planner::Reset() {
  releases_.clear();
  kv_.Reset();
}

}  // namespace treadle
