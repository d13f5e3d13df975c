// The half of a turn that takes in results: tokens to their streams, and records to the ledger.
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/status.h"
#include "scheduler/loop_core.h"

namespace treadle {

bool LoopCore::AbsorbResults() {
  std::vector<IterationResult> results = engine_.TakeResults();
  for (IterationResult& result : results) Absorb(result);
  return !results.empty();
}

void LoopCore::Absorb(IterationResult& result) {
  TREADLE_CHECK(!in_flight_.empty());
  TREADLE_CHECK(result.iteration == next_iteration_ - in_flight_.size());
  PlanInFlight note = std::move(in_flight_.front());
  in_flight_.pop_front();
  if (in_flight_.empty()) idle_since_ = now_;
  TREADLE_CHECK(result.steps.size() >= note.steps.size());  // padding's is the last

  for (Request* request : note.requests) {
    if (--request->plans_in_flight == 0) NotePlansDone(*request);
  }
  for (size_t i = 0; i < note.steps.size(); ++i) {
    const size_t wrong = AbsorbStep(note.steps[i], result.steps[i]);
    if (wrong == 0) continue;
    const RequestId request = note.steps[i].request->id;
    std::ranges::find(note.members, request, &LedgerMember::request)->tokens -=
        static_cast<int32_t>(wrong);
  }
  // A request that ended earlier has no step in this result; it retires here.
  for (Request* request : note.requests) Retire(*request);
  if (running_ + reserved_ == 0) delivery_.Flush(now_);
  for (size_t i = 0; i < note.stores.size(); ++i) {
    if (result.stored_pages[i].empty()) continue;
    kv_.files()->Store(std::move(note.stores[i]), std::move(result.stored_pages[i]));
  }
  if (!note.steps.empty()) {
    fetches_.NoteIteration(static_cast<int64_t>(note.work.rows), result.timings.compute);
    masks_.NoteIteration(result.timings.receive + result.timings.compute);
  }
  AppendRecord(result, note);
  note.Clear();
  spare_.push_back(std::move(note));
}

// Gives the number of its wrong guesses.
size_t LoopCore::AbsorbStep(const PlanInFlight::Target& target, StepResult& step) {
  Request& request = *target.request;
  Sequence& sequence = request.sequences[target.sequence];
  const std::span<RowResult> rows = step.outputs;
  const std::span<RowResult> samples = rows.last(static_cast<size_t>(target.samples));
  const size_t wrong = target.samples > 1 ? Speculation::TakeDraft(request, sequence, samples) : 0;
  NoteRun(request, sequence, target.end, target.samples, static_cast<int32_t>(wrong));
  if (request.state == RequestState::kFinished) return wrong;
  std::vector<TokenDetail> prompt;  // scored rows come before those that sample
  for (RowResult& row : rows.first(rows.size() - samples.size())) {
    prompt.push_back(std::move(row.target));
  }
  if (!prompt.empty()) delivery_.Prompt(request, std::move(prompt));
  if (samples.empty() || sequence.finished) return wrong;
  if (sequence.sits_out) {
    DropSample(request, sequence);
    return wrong;
  }
  for (RowResult& row : samples.first(samples.size() - wrong)) {
    AbsorbToken(request, sequence, row);
    if (sequence.finished || request.state == RequestState::kFinished) break;
  }
  return wrong;
}

void LoopCore::AbsorbToken(Request& request, Sequence& sequence, RowResult& row) {
  if (request.spec.pooling != Pooling::kNone) {
    delivery_.Token(
        request,
        {.detail = {}, .finish = FinishReason::kPooled, .embedding = std::move(row.hidden)});
    return FinishSequence(request, sequence, FinishReason::kPooled);
  }
  if (sequence.masked) {
    const absl::Status stuck = sequence.masked->Stuck(sequence.produced);
    if (!stuck.ok()) return End(request, stuck);
    sequence.masked->NoteToken(sequence.produced, row.token);
  }
  ++sequence.produced;
  sequence.output.push_back(row.token);
  speculation_.NoteToken(request, sequence);
  if (request.first_token == Clock::time_point{}) request.first_token = now_;
  FinishReason reason = FinishReason::kNone;
  if (std::ranges::count(request.spec.end_tokens, row.token) > 0) {
    reason = FinishReason::kEndToken;
  } else if (sequence.produced == request.spec.max_new_tokens) {
    reason = FinishReason::kLength;
  }
  delivery_.Token(request, {.candidate = sequence.candidate,
                            .token = row.token,
                            .detail = std::move(row.detail),
                            .finish = reason});
  if (reason != FinishReason::kNone) return FinishSequence(request, sequence, reason);
  masks_.NoteToken(request, sequence, now_);
}

void LoopCore::AppendRecord(const IterationResult& result, PlanInFlight& note) {
  const KvCapacity capacity = kv_.Capacity();
  LedgerRecord record;
  record.epoch = result.epoch;
  record.iteration = result.iteration;
  record.time = std::chrono::duration<double>(now_ - began_).count();
  record.arrivals = std::exchange(arrivals_, {});
  record.members = note.members;
  record.padding = note.padding;
  record.ends = delivery_.TakeEnds();
  record.waiting = waiting_;
  record.running = running_;
  record.free_pages = capacity.free_pages[capacity.Scarcest()];
  record.total_pages = capacity.total_pages[capacity.Scarcest()];
  record.schedule = note.schedule;
  record.queue = result.timings.queue;
  record.receive = result.timings.receive;
  record.compute = result.timings.compute;
  record.sample = result.timings.sample;
  record.idle = note.idle;
  record.bubble = note.behind ? result.timings.gap : 0;
  record.stages = limits_.stages;
  cost_.Note(note.work, record.receive + record.compute + record.sample + record.bubble);
  if (auto_batch_.any() && cost_.noted() % kGrowAfter == 0) GrowLimits();
  record.experts = result.experts;
  ledger_.Append(std::move(record));
}

}  // namespace treadle
