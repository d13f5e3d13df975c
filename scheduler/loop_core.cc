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

// Endings of requests.

void LoopCore::FinishSequence(Request& request, Sequence& sequence, FinishReason reason) {
  sequence.finished = true;
  sequence.finish = reason;
  forecast_.NoteAnswer(sequence.produced, request.spec.max_new_tokens);
  masks_.Forget(sequence);
  if (std::ranges::all_of(request.sequences, &Sequence::finished)) End(request, absl::OkStatus());
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
  speculation_.Choose(selection, /*model_may_run=*/in_flight_.empty() || limits_.stages > 1);
  IterationPlan plan = planner_.Build(selection, now_, note);
  note.padding = selection.empty() ? 0 : policy_.padding();
  if (compute_padding_ && note.padding > 0) {
    planner_.AddPadding(std::min(note.padding, limits_.max_batch_tokens - plan.num_tokens()), plan);
  }
  note.work = WorkOf(plan);
  waiting_ -= note.begun;
  running_ += note.begun;
  reserved_ += note.admitted - note.begun;
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
