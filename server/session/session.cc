#include "server/session/session.h"

#include <algorithm>
#include <ctime>
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

absl::StatusOr<std::shared_ptr<ApiKey>> SessionEnvironment::Authorize(
    std::string_view authorization) const {
  if (keys == nullptr) return std::shared_ptr<ApiKey>();
  return keys->Find(authorization);
}

void Session::Start(Caller caller, size_t bytes, Read read) {
  Begin(std::move(caller), bytes,
        [self = shared_from_this(), read = std::move(read)] { self->TakeIn(read); });
}

void Session::Resume(Caller caller, absl::StatusOr<ResumePoint> point) {
  std::function<void()> take_in = [self = shared_from_this(), status = point.status()] {
    self->Admit(status, nullptr);
  };
  if (point.ok()) {
    take_in = [self = shared_from_this(), shared = std::make_shared<const ResumePoint>(
                                              *std::move(point))] { self->TakeInStored(shared); };
  }
  Begin(std::move(caller), environment_.work.short_bytes + 1, std::move(take_in));
}

void Session::Begin(Caller caller, size_t bytes, std::function<void()> take_in) {
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
    status = environment_.pool_of_work.Submit(bytes, std::move(take_in));
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
        [self = shared_from_this(), held] { self->Admit(std::move(*held), nullptr); });
    if (status.ok()) return;
    request = status;
  }
  Admit(std::move(request), nullptr);
}

void Session::Admit(absl::StatusOr<GenerateRequest> read, RequestStore::Resumed* resumed) {
  RequestOrigin origin;
  Clock::time_point deadline;
  {
    MutexLock lock(mutex_);
    if (const absl::Status gone = Gone(); !gone.ok()) return Refuse(gone);
    origin = origin_;
    deadline = deadline_;
  }
  StoredRequest kept;
  const auto validate = [&]() -> absl::StatusOr<ValidatedRequest> {
    TREADLE_ASSIGN_OR_RETURN(GenerateRequest request, std::move(read));
    if (request.request_id.empty()) request.request_id = origin.header_id;
    kept.kind = std::move(request.kind);
    kept.body = std::move(request.body);
    if (request.request_id.empty() && !kept.kind.empty()) {
      request.request_id = Str("request-", std::hex, RandomSeed(), RandomSeed());
    }
    origin.id = request.request_id;
    return ValidateRequest(std::move(request), environment_.model, environment_.limits,
                           RandomSeed(), deadline);
  };
  const absl::StatusOr<ValidatedRequest> valid = validate();
  MutexLock lock(mutex_);
  origin_ = std::move(origin);
  if (const absl::Status status = Submit(valid, std::move(kept), resumed); !status.ok()) {
    return Refuse(status);
  }
  if (resumed != nullptr) environment_.courier.Post(shared_from_this());
  if (submitted_.stream == nullptr) return;
  submitted_.stream->SetNotifier([&courier = environment_.courier, session = weak_from_this()] {
    if (auto alive = session.lock()) courier.Post(std::move(alive));
  });
}

absl::Status Session::Submit(const absl::StatusOr<ValidatedRequest>& valid, StoredRequest kept,
                             RequestStore::Resumed* resumed) {
  TREADLE_RETURN_IF_ERROR(Gone());
  TREADLE_RETURN_IF_ERROR(valid.status());
  spec_ = valid->spec;
  spec_.key = origin_.key;
  spec_.deadline = deadline_;
  generation_.emplace(environment_.model.tokenizer.get(), spec_, valid->stop_strings,
                      valid->special_tokens);
  reasons_.resize(static_cast<size_t>(spec_.candidates), FinishReason::kNone);
  RequestSpec spec = spec_;
  if (resumed != nullptr) {
    stored_ = std::move(resumed->stream);
    TREADLE_ASSIGN_OR_RETURN(const bool goes_on, Replay(resumed->answer, spec));
    if (!goes_on) {
      taken_in_ = true;
      return absl::OkStatus();
    }
  } else if (!kept.kind.empty()) {
    TREADLE_ASSIGN_OR_RETURN(stored_, environment_.store->Reserve(Holder(spec_.client_id)));
  }
  if (key_) key_->Charge(static_cast<int64_t>(spec_.prompt.size()));
  TREADLE_ASSIGN_OR_RETURN(submitted_, environment_.pool.Submit(std::move(spec)));
  taken_in_ = true;
  if (stored_ == nullptr || resumed != nullptr) return absl::OkStatus();
  kept.created = std::time(nullptr);
  kept.prompt = spec_.prompt;
  kept.seed = spec_.sampling.seed;
  kept.max_new_tokens = spec_.max_new_tokens;
  stored_->Accept(std::move(kept), [&pool = environment_.pool, id = submitted_.id](
                                       const absl::Status& status) { pool.Cancel(id, status); });
  return absl::OkStatus();
}

void Session::Refuse(const absl::Status& status) {
  environment_.request_log.Refused(origin_, status);
  over_ = true;
  stored_.reset();
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
  if (again_) {
    const absl::Status status = environment_.pool_of_work.SubmitLong(
        [self = shared_from_this(), point = std::exchange(again_, {})] {
          self->TakeInStored(point);
        });
    if (!status.ok()) Refuse(status);
    return;
  }
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
    if (next_part_ == parts_.size() && !Collect()) break;
    if (abandoned_) next_part_ = parts_.size();
    if (next_part_ < parts_.size()) WriteNext();
  }
  if (!ended_ || over_ || writing_) return;
  if (status_.ok() && !abandoned_) {
    WriteNext();  // the end alone
  } else {
    over_ = true;
    stored_.reset();
    Fail(status_);
  }
}

// False: there is nothing new.
bool Session::Collect() {
  if (ended_) return false;
  StreamBatch batch = stored_ == nullptr ? submitted_.stream->Take() : TakeStored();
  if (batch.tokens.empty() && batch.prompt_detail.empty() && !batch.ended) return false;
  prompt_details_.insert(prompt_details_.end(),
                         std::make_move_iterator(batch.prompt_detail.begin()),
                         std::make_move_iterator(batch.prompt_detail.end()));
  parts_.clear();
  next_part_ = 0;
  if (stored_ == nullptr) {
    Absorb(batch.tokens);
  } else {
    for (StreamToken& token : batch.tokens) Absorb({std::move(token)});
  }
  if (!batch.ended) return true;
  ended_ = true;
  status_ = batch.status;
  timings_ = batch.timings;
  NoteEnd();
  return true;
}

void Session::Absorb(const std::vector<StreamToken>& tokens) {
  for (OutputPart& part : generation_->Absorb(tokens)) {
    if (part.finish != FinishReason::kNone) reasons_[part.candidate] = part.finish;
    if (part.finish == FinishReason::kStopString) {
      environment_.pool.FinishCandidate(submitted_.id, part.candidate);
    }
    if (from_token_ == 0 || generation_->completion_tokens() > from_token_) {
      parts_.push_back(std::move(part));
    }
  }
}

void Session::NoteEnd() {
  const int32_t new_tokens = generation_->completion_tokens() - replayed_tokens_;
  if (key_) key_->Charge(new_tokens);
  environment_.request_log.Finished(origin_,
                                    {.number = submitted_.id,
                                     .prompt_tokens = static_cast<int32_t>(spec_.prompt.size()),
                                     .generated_tokens = new_tokens,
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
  if (over_) {
    event.end = &end;
    stored_.reset();
  }
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
