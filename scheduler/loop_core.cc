#include "scheduler/loop_core.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/retry_after.h"
#include "base/status.h"

namespace treadle {
namespace {

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

class SteadyTime final : public TimeSource {
 public:
  Clock::time_point Now() const override { return Clock::now(); }
};

BatchLimits WithEngine(BatchLimits limits, const Engine& engine) {
  limits.stages = engine.stages();
  limits.depth = engine.depth();
  return limits;
}

}  // namespace

const TimeSource& TimeSource::Steady() {
  static const SteadyTime steady;
  return steady;
}

LoopCore::LoopCore(Engine& engine, KvSlotManager& kv, RequestPool& pool, Policy& policy,
                   Ledger& ledger, const TimeSource& time, const Options& options)
    : engine_(engine),
      kv_(kv),
      pool_(pool),
      policy_(policy),
      ledger_(ledger),
      time_(time),
      heartbeat_(options.heartbeat),
      max_ttft_(options.max_ttft),
      recover_(options.recover),
      compute_padding_(options.compute_padding),
      give_up_(options.give_up),
      began_(time.Now()),
      limits_(WithEngine(options.limits, engine)),
      planner_(kv),
      cached_([this](const Request& request) { return planner_.Cached(request); }),
      fetches_(kv, [&pool] { pool.Wake(); }),
      delivery_(policy.delivery()),
      cost_(options.position_share),
      forecast_(cost_),
      now_(began_),
      last_submit_(began_),
      idle_since_(began_),
      failing_since_(began_),
      speculation_(options.drafter, limits_, cost_, options.draft_model),
      masks_(engine, pool, [&pool] { pool.Wake(); }) {
  TREADLE_CHECK(limits_.max_batch_tokens > limits_.max_batch_size);
  if (compute_padding_) planner_.ReservePadding(PaddingRows(limits_));
}

absl::Status LoopCore::Calibrate(Calibration how, const AutoBatch& choice) {
  how.max_batch_tokens = limits_.max_batch_tokens;
  how.wait = [this](Clock::time_point until) { pool_.WaitForNews(until); };
  const absl::StatusOr<uint64_t> plans = treadle::Calibrate(engine_, how, cost_);
  pool_.Wake();  // the first turn is not to wait for news that were used up here
  TREADLE_RETURN_IF_ERROR(plans.status());
  next_iteration_ = *plans;
  if (cost_.noted() == 0) return absl::FailedPreconditionError("no iteration took any time");
  auto_batch_ = choice;
  most_ = limits_;
  limits_ = ChooseBatch(cost_, most_, auto_batch_);
  return absl::OkStatus();
}

// A measurement at the start may be that of a machine that was busy then.
void LoopCore::GrowLimits() {
  const BatchLimits chosen = ChooseBatch(cost_, most_, auto_batch_);
  limits_.max_batch_size = std::max(limits_.max_batch_size, chosen.max_batch_size);
  limits_.max_batch_tokens = std::max(limits_.max_batch_tokens, chosen.max_batch_tokens);
}

void LoopCore::Wait() {
  const Clock::time_point now = time_.Now();
  // Without room a heartbeat cannot be sent; the engine is looked at as often all the same.
  const Clock::time_point due = last_submit_ + heartbeat_;
  const Clock::time_point next = std::min(
      {next_deadline_, fetches_due_, masks_.next_due(), due > now_ ? due : now_ + heartbeat_});
  // `now` is the injected clock's; the pool waits on the machine's.
  pool_.WaitForNews(Clock::now() + std::max(next - now, Clock::duration::zero()));
}

bool LoopCore::Turn() {
  now_ = time_.Now();
  const bool absorbed = AbsorbResults();
  if (!engine_.status().ok()) Recover();
  for (const auto& [request, status] : masks_.Excuse(now_)) End(*request, status);
  TakeInbox();
  kv_.TellWhatIsKept();
  Expire();
  fetches_due_ = fetches_.Turn(pool_.live(), now_);
  Settle();
  masks_.Give();
  const bool submitted = SubmitPlans();
  masks_.Give();
  return submitted || absorbed;
}

// Results.

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
  const size_t wrong = target.samples > 1 ? TakeDraft(request, sequence, samples) : 0;
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

// The number of guesses of the sequence's step that are wrong. What was sampled after a wrong one
// is nobody's.
size_t LoopCore::TakeDraft(Request& request, Sequence& sequence,
                           std::span<const RowResult> samples) {
  const std::vector<int32_t> draft = std::exchange(sequence.draft, {});
  const size_t sure = sequence.masked ? sequence.masked->sure_rows() : samples.size();
  size_t right = 0;
  while (right < draft.size() && right + 1 < sure && samples[right].token == draft[right]) ++right;
  request.draft_tokens += static_cast<int32_t>(draft.size());
  request.accepted_draft_tokens += static_cast<int32_t>(right);
  return draft.size() - right;
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
  }

  if (sequence.masked) sequence.masked->NoteToken(sequence.produced, row.token);
  ++sequence.produced;
  sequence.output.push_back(row.token);
  speculation_.NoteToken(request, sequence);
  if (request.first_token == Clock::time_point{}) request.first_token = now_;
  const std::vector<int32_t>& ends = request.spec.end_tokens;
  FinishReason reason = FinishReason::kNone;
  if (std::find(ends.begin(), ends.end(), row.token) != ends.end()) {
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
  const IterationTimings& timings = result.timings;
  const KvCapacity capacity = kv_.Capacity();
  LedgerRecord record;
  record.epoch = result.epoch;
  record.iteration = result.iteration;
  record.time = Seconds(now_ - began_);
  record.arrivals = std::exchange(arrivals_, {});
  record.members = note.members;
  record.padding = note.padding;
  record.ends = delivery_.TakeEnds();
  record.waiting = waiting_;
  record.running = running_;
  record.free_pages = capacity.free_pages[capacity.Scarcest()];
  record.total_pages = capacity.total_pages[capacity.Scarcest()];
  record.schedule = note.schedule;
  record.queue = timings.queue;
  record.receive = timings.receive;
  record.compute = timings.compute;
  record.sample = timings.sample;
  record.idle = note.idle;
  record.bubble = note.behind ? timings.gap : 0;
  record.stages = limits_.stages;
  cost_.Note(note.work, record.receive + record.compute + record.sample + record.bubble);
  if (auto_batch_.any() && cost_.noted() % kGrowAfter == 0) GrowLimits();
  record.experts = result.experts;
  ledger_.Append(std::move(record));
}

// Endings of requests.

void LoopCore::FinishSequence(Request& request, Sequence& sequence, FinishReason reason) {
  sequence.finished = true;
  sequence.finish = reason;
  forecast_.NoteAnswer(sequence.produced, request.spec.max_new_tokens);
  masks_.Forget(sequence);
  const bool all = std::all_of(request.sequences.begin(), request.sequences.end(),
                               [](const Sequence& other) { return other.finished; });
  if (all) End(request, absl::OkStatus());
}

void LoopCore::End(Request& request, const absl::Status& status) {
  if (request.state == RequestState::kFinished) return;
  const bool admitted = request.state != RequestState::kWaiting;
  if (request.begun != Clock::time_point()) {
    --running_;
  } else {
    --waiting_;
    if (admitted) --reserved_;
  }
  request.state = RequestState::kFinished;
  request.fetch = nullptr;
  for (Sequence& sequence : request.sequences) masks_.Forget(sequence);
  delivery_.End(request, status, now_);
  policy_.OnEnd(request, now_);
  Retire(request);
}

void LoopCore::Retire(Request& request) {
  if (request.state != RequestState::kFinished || request.plans_in_flight > 0) return;
  planner_.Retire(request);  // the second time there is nothing left to free
  some_left_ = true;
}

void LoopCore::Recover() {
  const absl::Status status =
      absl::UnavailableError(Str("the engine failed: ", std::string(engine_.status().message())));
  const bool stood = std::exchange(stood_, false);
  if (stood) failing_since_ = now_;
  const bool all = give_up_ || now_ - failing_since_ >= kRestartPatience;
  if (give_up_) pool_.Drain();
  if (all) TakeInbox();
  for (const PlanInFlight& plan : in_flight_) planner_.NoteLost(plan);
  in_flight_.clear();
  masks_.Clear();
  for (const auto& request : pool_.live()) {
    request->plans_in_flight = 0;
    planner_.NoteLost(*request);
    if (all) End(*request, status);
    RecoverRequest(*request, status, stood);
  }
  planner_.NewEpoch();
  if (give_up_) {
    if (!std::exchange(gave_up_, true)) give_up_(status);
    return;
  }
  engine_.Restart();
  next_iteration_ = 0;
  idle_since_ = now_;
}

void LoopCore::RecoverRequest(Request& request, const absl::Status& status, bool stood) {
  if (request.state == RequestState::kWaiting) return;
  const bool enough = NoteLoss(request, stood);
  if (!recover_ || enough) End(request, status);
  if (request.state == RequestState::kFinished) return Retire(request);
  planner_.Restart(request);
}

// Decides which stages must recompute each running request's known tokens.
void LoopCore::NoteStanding() {
  StageRange lost = engine_.TakeLost();
  // A single stage runs several plans of a request ahead of what is known, and a window's ring has
  // room for one.
  if (limits_.stages == 1) lost = {};
  if (!lost.empty()) planner_.ForgetCached();
  for (const auto& request : pool_.live()) {
    if (request->state != RequestState::kRunning) continue;
    NoteMissing(*request, lost, engine_.replay_pages());
  }
}

void LoopCore::TakeInbox() {
  RequestPool::Inbox inbox = pool_.TakeInbox();
  for (auto& request : inbox.arrivals) {
    next_deadline_ = std::min(next_deadline_, request->spec.deadline);
    request->arrival = now_;
    arrivals_.push_back({request->id, request->prompt_length(), request->spec.owner});
    ++waiting_;
    policy_.OnArrival(*request);
    pool_.live().push_back(std::move(request));
    Foretell(*pool_.live().back());
  }
  for (RequestPool::Command& command : inbox.commands) Apply(command);
  if (inbox.forget_cached) {
    planner_.ForgetCached();
    for (PlanInFlight& plan : in_flight_) plan.stores.clear();
    if (kv_.files() != nullptr) kv_.files()->Clear();
  }
  draining_ = inbox.draining;
}

// Ends a request that has just come if its first token would come too late. It may come again when
// what is before it has become less by as much as it is too late, if nobody else comes meanwhile.
void LoopCore::Foretell(Request& request) {
  if (max_ttft_ == Clock::duration(0) || request.spec.internal || !request.spec.earlier.empty()) {
    return;
  }
  const bool by_deadline = request.spec.deadline - now_ < max_ttft_;
  const double most = Seconds(by_deadline ? request.spec.deadline - now_ : max_ttft_);
  double in_flight = 0;
  for (const PlanInFlight& plan : in_flight_) in_flight += cost_.Of(plan.work);
  const PolicyView view{pool_.live(), kv_.Capacity(), limits_, now_, cached_};
  request.predicted_first_token =
      forecast_.Predict(view, policy_.Order(view), request, in_flight, most + kMaxRetry);
  const double late = request.predicted_first_token.value_or(0) - most;
  if (late <= 0) return;
  const absl::Status refusal = ResourceExhausted(
      "the first token would come in ", *request.predicted_first_token, " s or later, with ",
      running_, " requests that run and ", waiting_ - 1, " that wait; expected less than the ",
      most, " s of ", by_deadline ? "its deadline" : "--max-ttft");
  End(request, WithRetryAfter(refusal, std::min(late, kMaxRetry)));
}

void LoopCore::Apply(RequestPool::Command& command) {
  Request* request = pool_.Find(command.id);
  if (request == nullptr || request->state == RequestState::kFinished) return;
  switch (command.kind) {
    case RequestPool::Command::Kind::kCancel:
      End(*request, command.status);
      break;
    case RequestPool::Command::Kind::kFinishCandidate:
      FinishCandidate(*request, command.candidate);
      break;
  }
}

void LoopCore::FinishCandidate(Request& request, uint32_t candidate) {
  if (candidate >= request.sequences.size()) return;
  Sequence& sequence = request.sequences[candidate];
  if (sequence.finished) {
    sequence.finish = FinishReason::kStopString;  // outranks what the loop had found
    return;
  }
  StreamToken stop;  // without a token: the candidate ends here
  stop.candidate = candidate;
  stop.finish = FinishReason::kStopString;
  delivery_.Token(request, std::move(stop));
  FinishSequence(request, sequence, FinishReason::kStopString);
}

void LoopCore::Expire() {
  if (now_ < next_deadline_) return;
  next_deadline_ = Clock::time_point::max();
  for (const auto& request : pool_.live()) {
    if (request->state == RequestState::kFinished) continue;
    if (request->spec.deadline <= now_) {
      End(*request, absl::DeadlineExceededError("the request's deadline passed"));
    } else {
      next_deadline_ = std::min(next_deadline_, request->spec.deadline);
    }
  }
}

// Drops what has ended and tells the pool what is left.
void LoopCore::Settle() {
  if (running_ + reserved_ == 0) delivery_.Flush(now_);
  if (std::exchange(some_left_, false)) {
    std::erase_if(pool_.live(), [](const std::unique_ptr<Request>& request) {
      return request->state == RequestState::kFinished && request->plans_in_flight == 0;
    });
  }
  pool_.NoteCounts(waiting_, reserved_, running_);
  const bool stored = !kv_.has_stores() && std::ranges::all_of(in_flight_, [](const auto& plan) {
    return plan.stores.empty();
  });
  drained_ = draining_ && waiting_ + running_ == 0 && (stored || !engine_stands());
}

void LoopCore::EndAll(const absl::Status& status) {
  now_ = time_.Now();
  TakeInbox();
  for (const auto& request : pool_.live()) End(*request, status);
  delivery_.Flush(now_);
  in_flight_.clear();
  pool_.live().clear();
  planner_.Reset();
  pool_.NoteCounts(waiting_, reserved_, running_);
  IterationResult nothing;
  nothing.epoch = engine_.epoch();
  nothing.iteration = next_iteration_;
  PlanInFlight none;
  AppendRecord(nothing, none);
}

// Plans.

bool LoopCore::SubmitPlans() {
  bool submitted = false;
  while (engine_.HasRoom()) {
    if (!std::exchange(stood_, true)) NoteStanding();
    if (limits_.stages == 1 && !in_flight_.empty() && speculation_.Waits(pool_.live())) break;
    const Clock::time_point before = time_.Now();
    const Selection next = policy_.Select({pool_.live(), kv_.Capacity(), limits_, now_, cached_});
    if (next.empty() && !HeartbeatDue() && !kv_.has_stores()) break;
    Submit(next, before);
    submitted = true;
  }
  if (submitted) pool_.NoteCounts(waiting_, reserved_, running_);
  return submitted;
}

void LoopCore::Submit(const Selection& selection, Clock::time_point selecting_since) {
  PlanInFlight note;
  if (!spare_.empty()) {
    note = std::move(spare_.back());
    spare_.pop_back();
  }
  const auto counted = [&](auto of) {
    return std::ranges::count_if(selection,
                                 [of](const Selected& member) { return of(*member.request); });
  };
  const auto begun = [](const Request& request) { return request.begun != Clock::time_point(); };
  const auto reserved = [&](const Request& request) {
    return request.state != RequestState::kWaiting && !begun(request);
  };
  const int64_t begun_before = counted(begun), reserved_before = counted(reserved);
  speculation_.Choose(selection, /*model_may_run=*/in_flight_.empty() || limits_.stages > 1);
  IterationPlan plan = planner_.Build(selection, now_, note);
  note.padding = selection.empty() ? 0 : policy_.padding();
  if (compute_padding_ && note.padding > 0) {
    planner_.AddPadding(std::min(note.padding, limits_.max_batch_tokens - plan.num_tokens()), plan);
  }
  note.work = WorkOf(plan);
  const int64_t began = counted(begun) - begun_before;
  waiting_ -= began;
  running_ += began;
  reserved_ += counted(reserved) - reserved_before;
  plan.epoch = engine_.epoch();
  plan.iteration = next_iteration_++;
  last_submit_ = time_.Now();
  note.schedule = Seconds(last_submit_ - selecting_since);
  if (in_flight_.empty()) note.idle = Seconds(last_submit_ - idle_since_);
  note.behind = std::any_of(in_flight_.begin(), in_flight_.end(),
                            [](const PlanInFlight& other) { return !other.steps.empty(); });
  masks_.NotePlan(plan, note, now_);
  in_flight_.push_back(std::move(note));
  engine_.Submit(std::move(plan));
}

}  // namespace treadle
