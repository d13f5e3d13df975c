#include "server/session/session.h"

#include <algorithm>
#include <ctime>
#include <iterator>
#include <random>
#include <utility>

#include "base/quoted.h"
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

absl::StatusOr<std::shared_ptr<ApiKey>> SessionEnvironment::KeyOf(
    std::string_view authorization) const {
  if (keys == nullptr) return std::shared_ptr<ApiKey>();
  return keys->Find(authorization);
}

absl::StatusOr<std::shared_ptr<ApiKey>> SessionEnvironment::Authorize(
    std::string_view authorization) const {
  auto key = KeyOf(authorization);
  refusals->Add(key.status()).IgnoreError();
  return key;
}

absl::Status SessionEnvironment::CheckOperator(std::string_view authorization) const {
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<ApiKey> key, KeyOf(authorization));
  if (key && key->terms().is_operator) return absl::OkStatus();
  return absl::PermissionDeniedError(
      "this call changes the server, expected an operator's key "
      "(--api-keys-file)");
}

absl::StatusOr<std::string> SessionEnvironment::OwnerOf(std::string_view authorization) const {
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<ApiKey> key, KeyOf(authorization));
  return key ? key->terms().owner : std::string();
}

absl::Status SessionEnvironment::Submit(std::string_view authorization, RequestOrigin origin,
                                        size_t bytes, std::function<void()> work) {
  TREADLE_ASSIGN_OR_RETURN(const std::shared_ptr<ApiKey> key, Authorize(authorization));
  if (key) {
    origin.owner = key->terms().owner;
    TREADLE_RETURN_IF_ERROR(refusals->Add(key->Admit(Clock::now())));
  }
  return refusals->Add(pool_of_work.Submit(FairShareOf(origin), bytes, std::move(work)));
}

std::string FairShareOf(const RequestOrigin& origin) {
  return origin.owner.empty() ? origin.client.substr(0, origin.client.rfind(':')) : origin.owner;
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
  bytes_ = bytes;
  origin_ = std::move(caller.origin);
  arrival_ = caller.arrival;
  deadline_ = caller.deadline;
  auto key = environment_.KeyOf(caller.authorization);
  absl::Status status = key.status();
  if (status.ok() && *key) {
    key_ = *std::move(key);
    ApiKey::Terms terms = key_->terms();
    origin_.key = std::move(terms.name);
    origin_.owner = std::move(terms.owner);
    status = key_->Admit(Clock::now());
  }
  if (status.ok()) {
    status = environment_.pool_of_work.Submit(FairShareOf(origin_), bytes, std::move(take_in));
  }
  if (!status.ok()) Refuse(status);
}

void Session::TakeIn(const Read& read) {
  {
    MutexLock lock(mutex_);
    if (const absl::Status gone = Gone(); !gone.ok()) return Refuse(gone);
  }
  TakeAdapter(read(), nullptr);
}

// A load is waited for without a thread; what follows waits for its turn once more.
void Session::TakeAdapter(absl::StatusOr<GenerateRequest> read,
                          std::shared_ptr<RequestStore::Resumed> resumed) {
  if (!read.ok() || read->adapter.empty()) return TryConstraint(std::move(read), resumed);
  AdapterRegistry* const adapters = environment_.model.adapters.get();
  const auto take = [this](AdapterHold hold) {
    MutexLock lock(mutex_);
    adapter_ = std::move(hold);
  };
  if (adapters == nullptr) {
    return TryConstraint(NotFound("adapter is ", Quoted(read->adapter),
                                  ", expected none: this server was started without --lora"),
                         resumed);
  }
  if (auto hold = adapters->TryHold(read->adapter)) {
    take(*std::move(hold));
    return TryConstraint(std::move(read), resumed);
  }
  std::string owner;
  size_t bytes = 0;
  Clock::time_point deadline;
  {
    MutexLock lock(mutex_);
    owner = FairShareOf(origin_);
    bytes = bytes_;
    deadline = deadline_;
  }
  const auto held = std::make_shared<GenerateRequest>(*std::move(read));
  adapters->Hold(held->adapter, deadline,
                 [this, self = shared_from_this(), take, owner, bytes, held,
                  resumed](absl::StatusOr<AdapterHold> hold) {
                   absl::Status status = hold.status();
                   if (status.ok()) {
                     take(*std::move(hold));
                     status = environment_.pool_of_work.Submit(owner, bytes, [self, held, resumed] {
                       self->TryConstraint(std::move(*held), resumed);
                     });
                   }
                   if (!status.ok()) Admit(status, resumed.get());
                 });
}

void Session::TryConstraint(absl::StatusOr<GenerateRequest> read,
                            std::shared_ptr<RequestStore::Resumed> resumed) {
  const auto& constraints = environment_.model.constraints;
  if (!read.ok() || !read->constraint || !constraints || constraints->Keeps(*read->constraint)) {
    return Admit(std::move(read), resumed.get());
  }
  std::string owner;
  size_t bytes = 0;
  {
    MutexLock lock(mutex_);
    owner = FairShareOf(origin_);
    bytes = bytes_;
  }
  const auto held = std::make_shared<GenerateRequest>(*std::move(read));
  const absl::Status status = environment_.pool_of_work.Submit(
      owner, bytes,
      [self = shared_from_this(), held, resumed] { self->Admit(std::move(*held), resumed.get()); },
      WorkPool::Kind::kTrial);
  if (!status.ok()) Admit(status, resumed.get());
}

void Session::Admit(absl::StatusOr<GenerateRequest> read, RequestStore::Resumed* resumed) {
  RequestOrigin origin;
  int32_t virtual_tokens = 0;
  Clock::time_point deadline;
  {
    MutexLock lock(mutex_);
    if (const absl::Status gone = Gone(); !gone.ok()) return Refuse(gone);
    virtual_tokens = adapter_.virtual_tokens;
    origin = origin_;
    deadline = deadline_;
  }
  StoredRequest kept;
  const auto validate = [&]() -> absl::StatusOr<ValidatedRequest> {
    TREADLE_ASSIGN_OR_RETURN(GenerateRequest request, std::move(read));
    request.virtual_tokens = virtual_tokens;
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
  spec_.owner = origin_.owner;
  if (key_) spec_.weight = key_->terms().weight;
  // Owners and adapters are apart, whatever salts they choose; no owner has a NUL.
  spec_.cache_salt = origin_.owner + '\0' + adapter_.hash + '\0' + spec_.cache_salt;
  spec_.adapter = adapter_.id;
  spec_.deadline = deadline_;
  generation_.emplace(environment_.model.tokenizer.get(), spec_, valid->stop_strings,
                      valid->generation);
  reasons_.resize(static_cast<size_t>(spec_.candidates), FinishReason::kNone);
  RequestSpec spec = spec_;
  // The client hears of its text alone.
  spec_.prompt.erase(spec_.prompt.begin(), spec_.prompt.begin() + spec_.virtual_tokens);
  spec_.virtual_tokens = 0;
  spec.adapter_hold = std::move(adapter_.hold);
  if (resumed != nullptr && resumed->request.adapter != adapter_.hash) {
    return absl::FailedPreconditionError(Str(
        "the adapter of the request has the contents ", adapter_.hash, ", it was accepted with ",
        resumed->request.adapter.empty() ? "none" : resumed->request.adapter));
  }
  if (resumed != nullptr) {
    stored_ = std::move(resumed->stream);
    TREADLE_ASSIGN_OR_RETURN(const bool goes_on, Replay(resumed->answer, spec));
    if (!goes_on) {
      Become(SessionStep::kSubmit);
      return absl::OkStatus();
    }
  } else if (!kept.kind.empty()) {
    TREADLE_ASSIGN_OR_RETURN(stored_, environment_.store->Reserve(Holder(spec_.client_id)));
  }
  if (key_) key_->Charge(static_cast<int64_t>(spec_.prompt.size()));
  TREADLE_ASSIGN_OR_RETURN(submitted_, environment_.pool.Submit(std::move(spec)));
  Become(SessionStep::kSubmit);
  if (stored_ == nullptr || resumed != nullptr) return absl::OkStatus();
  kept.created = std::time(nullptr);
  kept.prompt = spec_.prompt;
  kept.seed = spec_.sampling.seed;
  kept.adapter = adapter_.hash;
  kept.max_new_tokens = spec_.max_new_tokens;
  stored_->Accept(std::move(kept), [&pool = environment_.pool, id = submitted_.id](
                                       const absl::Status& status) { pool.Cancel(id, status); });
  return absl::OkStatus();
}

void Session::Refuse(const absl::Status& status) {
  environment_.refusals->Add(status).IgnoreError();
  environment_.request_log.Refused(origin_, status);
  End(status);
}

void Session::End(const absl::Status& status) {
  Become(SessionStep::kEnd);
  stored_.reset();
  Fail(status);
}

void Session::Become(SessionStep step) {
  const auto* found = std::ranges::find_if(kSessionTransitions, [&](const auto& transition) {
    return transition.from == phase_ && transition.step == step;
  });
  TREADLE_CHECK(found != std::end(kSessionTransitions));
  phase_ = found->to;
}

bool Session::Left() const {
  return phase_ == SessionPhase::kUnreadLeft || phase_ == SessionPhase::kWaitingLeft ||
         phase_ == SessionPhase::kStoringLeft || phase_ == SessionPhase::kWritingLeft;
}

bool Session::Idle() const {
  return phase_ == SessionPhase::kWaiting || phase_ == SessionPhase::kWaitingLeft;
}

absl::Status Session::Gone() {
  return Left() || Clock::now() >= deadline_ ? WhyGone() : absl::OkStatus();
}

absl::Status Session::WhyGone() const {
  return DeadlineReached(arrival_, deadline_)
             ? absl::DeadlineExceededError("the deadline passed")
             : absl::CancelledError("the client cancelled or disconnected");
}

bool Session::Leave(const absl::Status& why) {
  if (Left() || phase_ == SessionPhase::kOver) return false;
  const bool submitted = phase_ != SessionPhase::kUnread;
  Become(SessionStep::kLeave);
  if (submitted) environment_.pool.Cancel(submitted_.id, why);
  return true;
}

void Session::Deliver() {
  MutexLock lock(mutex_);
  Advance();
}

void Session::Written(bool ok) {
  MutexLock lock(mutex_);
  Become(SessionStep::kWritten);
  if (!ok) Leave(WhyGone());
  Advance();
}

void Session::Cancel() {
  MutexLock lock(mutex_);
  Leave(WhyGone());
  Advance();
}

void Session::OnAlarm() {
  MutexLock lock(mutex_);
  if (again_) {
    const absl::Status status = environment_.pool_of_work.Submit(
        FairShareOf(origin_), bytes_,
        [self = shared_from_this(), point = std::exchange(again_, {})] {
          self->TakeInStored(point);
        });
    if (!status.ok()) Refuse(status);
    return;
  }
  if (phase_ != SessionPhase::kWriting && phase_ != SessionPhase::kWritingLeft) return;
  if (Clock::now() < write_began_ + environment_.stall_timeout) return WatchWrite();
  Leave(absl::CancelledError("the client did not read (--stream-stall-timeout)"));
  BreakWrite();
}

void Session::Release() {
  environment_.calls.Remove();
  std::shared_ptr<Session> last;  // released after the lock
  MutexLock lock(mutex_);
  last = std::move(self_);
}

void Session::Advance() {
  // Until the stream is empty: of what came during a write it does not tell again.
  while (Idle()) {
    if (Left()) next_part_ = parts_.size();
    if (next_part_ < parts_.size()) {
      WriteNext();
    } else if (!Collect()) {
      break;
    }
  }
  if (!ended_ || !Idle()) return;
  if (ended_->status.ok() && !Left()) {
    WriteNext();  // the end alone
  } else {
    End(ended_->status);
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
  NoteEnd({batch.status, batch.timings});
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

void Session::NoteEnd(RequestEnd end) {
  const int32_t new_tokens = generation_->completion_tokens() - replayed_tokens_;
  if (key_) key_->Charge(new_tokens);
  environment_.request_log.Finished(origin_,
                                    {.number = submitted_.id,
                                     .prompt_tokens = static_cast<int32_t>(spec_.prompt.size()),
                                     .generated_tokens = new_tokens,
                                     .reasons = reasons_,
                                     .status = end.status,
                                     .timings = end.timings});
  ended_ = std::move(end);
}

void Session::WriteNext() {
  const int32_t held = submitted_.stream ? submitted_.stream->cached_tokens() : 0;
  const int32_t cached = std::max(0, held - adapter_.virtual_tokens);
  const SessionEvent::Prompt prompt{spec_, prompt_details_, cached, submitted_.id};
  SessionEvent::End end;
  SessionEvent event;
  if (events_++ == 0) event.prompt = &prompt;
  if (next_part_ < parts_.size()) event.output = &parts_[next_part_++];
  if (ended_ && ended_->status.ok() && next_part_ == parts_.size()) {
    end = {static_cast<int32_t>(spec_.prompt.size()), cached, generation_->completion_tokens(),
           ended_->timings};
    event.end = &end;
    Become(SessionStep::kEnd);
    stored_.reset();
    Write(event);
  } else if (!Write(event)) {
    Become(SessionStep::kWrite);
    write_began_ = Clock::now();
    WatchWrite();
  }
}

void Session::WatchWrite() {
  environment_.courier.WakeAt(write_began_ + environment_.stall_timeout, shared_from_this());
}

}  // namespace treadle
