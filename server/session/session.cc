#include "server/session/session.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

// A client's own timer hangs up shortly before ours: its clock started earlier, by the time that
// the request travelled, and gRPC rounds the time that it sends up by as much as one percent. To
// hang up that close to the deadline is the deadline.
bool DeadlineReached(Clock::time_point arrival, Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) return false;
  const Clock::duration total = deadline - arrival;
  const Clock::duration margin = total / 64 + std::chrono::milliseconds(100);
  return Clock::now() >= deadline - std::min(total / 4, margin);
}

uint64_t RandomSeed() {
  static thread_local std::random_device device;
  return uint64_t{device()} << 32 | device();
}

}  // namespace

Courier::Courier() : thread_([this] { Run(); }) {}

Courier::~Courier() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    news_.NotifyOne();
  }
  thread_.join();
}

void Courier::Post(std::shared_ptr<Recipient> recipient) {
  if (recipient->posted_.exchange(true)) return;
  MutexLock lock(mutex_);
  posted_.push_back(std::move(recipient));
  if (posted_.size() == 1) news_.NotifyOne();
}

void Courier::WakeAt(TimePoint when, std::weak_ptr<Recipient> recipient) {
  MutexLock lock(mutex_);
  const bool first = alarms_.empty() || when < alarms_.begin()->first;
  alarms_.emplace(when, std::move(recipient));
  if (first) news_.NotifyOne();
}

void Courier::Run() {
  std::vector<std::shared_ptr<Recipient>> posted;
  std::vector<std::shared_ptr<Recipient>> due;
  while (true) {
    {
      MutexLock lock(mutex_);
      while (posted_.empty() && !stopping_) {
        if (alarms_.empty()) {
          news_.Wait(mutex_);
        } else if (std::chrono::steady_clock::now() >= alarms_.begin()->first ||
                   !news_.WaitUntil(mutex_, alarms_.begin()->first)) {
          break;
        }
      }
      if (posted_.empty() && stopping_) return;
      posted.swap(posted_);
      const TimePoint now = std::chrono::steady_clock::now();
      while (!alarms_.empty() && alarms_.begin()->first <= now) {
        if (auto recipient = alarms_.begin()->second.lock()) due.push_back(std::move(recipient));
        alarms_.erase(alarms_.begin());
      }
    }
    for (auto& recipient : posted) {
      recipient->posted_.store(false);  // before Deliver: news that come meanwhile post again
      recipient->Deliver();
    }
    for (auto& recipient : due) recipient->OnAlarm();
    posted.clear();
    due.clear();
  }
}

absl::StatusOr<std::shared_ptr<ApiKey>> SessionEnvironment::Authorize(
    std::string_view authorization) const {
  if (keys == nullptr) return std::shared_ptr<ApiKey>();
  return keys->Find(authorization);
}

void Session::Start(Caller caller, size_t bytes, Read read) {
  environment_.calls.Add();
  MutexLock lock(mutex_);
  self_ = shared_from_this();
  origin_ = std::move(caller.origin);
  arrival_ = caller.arrival;
  deadline_ = caller.deadline;
  auto key = environment_.Authorize(caller.authorization);
  absl::Status status = key.status();
  if (status.ok() && *key) {
    key_ = *std::move(key);
    origin_.key = key_->name();
    status = key_->Admit(Clock::now());
  }
  if (status.ok()) {
    status = environment_.pool_of_work.Submit(
        bytes, [self = self_, read = std::move(read)] { self->TakeIn(read); });
  }
  if (!status.ok()) Refuse(status);
}

void Session::TakeIn(const Read& read) {
  {
    MutexLock lock(mutex_);
    if (const absl::Status gone = Gone(); !gone.ok()) return Refuse(gone);
  }
  absl::StatusOr<GenerateRequest> request = read();
  const auto& constraints = environment_.model.constraints;
  if (request.ok() && request->constraint && constraints &&
      !constraints->Keeps(*request->constraint)) {
    const auto held = std::make_shared<GenerateRequest>(*std::move(request));
    const absl::Status status = environment_.pool_of_work.SubmitLong(
        [self = shared_from_this(), held] { self->Admit(std::move(*held)); });
    if (status.ok()) return;
    request = status;
  }
  Admit(std::move(request));
}

void Session::Admit(absl::StatusOr<GenerateRequest> read) {
  RequestOrigin origin;
  Clock::time_point deadline;
  {
    MutexLock lock(mutex_);
    if (const absl::Status gone = Gone(); !gone.ok()) return Refuse(gone);
    origin = origin_;
    deadline = deadline_;
  }
  const auto validate = [&]() -> absl::StatusOr<ValidatedRequest> {
    TREADLE_ASSIGN_OR_RETURN(GenerateRequest request, std::move(read));
    if (request.request_id.empty()) request.request_id = origin.header_id;
    origin.id = request.request_id;
    return ValidateRequest(std::move(request), environment_.model, environment_.limits,
                           RandomSeed(), deadline);
  };
  const absl::StatusOr<ValidatedRequest> valid = validate();
  MutexLock lock(mutex_);
  origin_ = std::move(origin);
  if (const absl::Status status = Submit(valid); !status.ok()) return Refuse(status);
  submitted_.stream->SetNotifier([&courier = environment_.courier, session = weak_from_this()] {
    if (auto alive = session.lock()) courier.Post(std::move(alive));
  });
}

absl::Status Session::Submit(const absl::StatusOr<ValidatedRequest>& valid) {
  TREADLE_RETURN_IF_ERROR(Gone());
  TREADLE_RETURN_IF_ERROR(valid.status());
  spec_ = valid->spec;
  spec_.key = origin_.key;
  spec_.deadline = deadline_;
  if (key_) key_->Charge(static_cast<int64_t>(spec_.prompt.size()));
  TREADLE_ASSIGN_OR_RETURN(submitted_, environment_.pool.Submit(spec_));
  taken_in_ = true;
  generation_.emplace(environment_.model.tokenizer.get(), spec_, valid->stop_strings,
                      valid->special_tokens);
  reasons_.resize(static_cast<size_t>(spec_.candidates), FinishReason::kNone);
  return absl::OkStatus();
}

void Session::Refuse(const absl::Status& status) {
  environment_.request_log.Refused(origin_, status);
  over_ = true;
  Fail(status);
}

absl::Status Session::Gone() {
  if (!abandoned_ && Clock::now() < deadline_) return absl::OkStatus();
  return DeadlineReached(arrival_, deadline_)
             ? absl::DeadlineExceededError("the deadline passed")
             : absl::CancelledError("the client cancelled or disconnected");
}

void Session::Deliver() {
  MutexLock lock(mutex_);
  Advance();
}

void Session::Written(bool ok) {
  MutexLock lock(mutex_);
  writing_ = false;
  if (!ok) Abandon();
  Advance();
}

void Session::Cancel() {
  MutexLock lock(mutex_);
  Abandon();
  Advance();
}

void Session::Abandon() {
  const bool first = !std::exchange(abandoned_, true);
  if (first && taken_in_ && !over_) environment_.pool.Cancel(submitted_.id, Gone());
}

void Session::OnAlarm() {
  MutexLock lock(mutex_);
  alarm_set_ = false;
  if (over_ || !writing_) return;
  if (Clock::now() < write_began_ + environment_.stall_timeout) {
    SetAlarm();
    return;
  }
  if (!abandoned_) {
    environment_.pool.Cancel(
        submitted_.id, absl::CancelledError("the client did not read (--stream-stall-timeout)"));
  }
  abandoned_ = true;
  BreakWrite();
}

void Session::Release() {
  environment_.calls.Remove();
  std::shared_ptr<Session> last;  // released after the lock
  MutexLock lock(mutex_);
  last = std::move(self_);
}

void Session::Advance() {
  if (over_ || writing_ || !taken_in_) return;  // who is not taken in yet is refused by TakeIn
  // Until the stream is empty: of what came during a write it does not tell again.
  while (!over_ && !writing_) {
    if (next_part_ == parts_.size()) Collect();
    if (abandoned_ && next_part_ < parts_.size()) {
      next_part_ = parts_.size();
      continue;
    }
    if (next_part_ == parts_.size()) break;
    WriteNext();
  }
  if (!ended_ || over_ || writing_) return;
  if (status_.ok() && !abandoned_) {
    WriteNext();  // the end alone
  } else {
    over_ = true;
    Fail(status_);
  }
}

// Whatever the token stream has.
void Session::Collect() {
  if (ended_) return;
  StreamBatch batch = submitted_.stream->Take();
  prompt_details_.insert(prompt_details_.end(),
                         std::make_move_iterator(batch.prompt_detail.begin()),
                         std::make_move_iterator(batch.prompt_detail.end()));
  parts_ = generation_->Absorb(batch.tokens);
  next_part_ = 0;
  for (const OutputPart& part : parts_) {
    if (part.finish != FinishReason::kNone) reasons_[part.candidate] = part.finish;
    if (part.finish == FinishReason::kStopString) {
      environment_.pool.FinishCandidate(submitted_.id, part.candidate);
    }
  }
  if (!batch.ended) return;
  ended_ = true;
  status_ = batch.status;
  timings_ = batch.timings;
  if (key_) key_->Charge(generation_->completion_tokens());
  environment_.request_log.Finished(origin_,
                                    {.number = submitted_.id,
                                     .prompt_tokens = static_cast<int32_t>(spec_.prompt.size()),
                                     .generated_tokens = generation_->completion_tokens(),
                                     .reasons = reasons_,
                                     .status = status_,
                                     .timings = timings_});
}

void Session::WriteNext() {
  const SessionEvent::Prompt prompt{spec_, prompt_details_};
  const SessionEvent::End end{static_cast<int32_t>(spec_.prompt.size()),
                              generation_->completion_tokens(), timings_};
  SessionEvent event;
  if (!std::exchange(began_, true)) event.prompt = &prompt;
  if (next_part_ < parts_.size()) event.output = &parts_[next_part_++];
  over_ = ended_ && status_.ok() && next_part_ == parts_.size();
  if (over_) event.end = &end;
  writing_ = !Write(event) && !over_;
  if (!writing_) return;
  write_began_ = Clock::now();
  if (!alarm_set_) SetAlarm();
}

// At most one alarm is pending: a stream of many short writes does not pay for each.
void Session::SetAlarm() {
  alarm_set_ = true;
  environment_.courier.WakeAt(write_began_ + environment_.stall_timeout, weak_from_this());
}

}  // namespace treadle
