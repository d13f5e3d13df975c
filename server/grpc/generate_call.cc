#include "server/grpc/generate_call.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <utility>

#include "base/status.h"
#include "server/grpc/byte_buffers.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"
#include "server/grpc/refused_stream.h"
#include "server/grpc/rpc_status.h"
#include "server/session/generation.h"

namespace treadle {
namespace {

// The gRPC deadline is the request's deadline.
struct Deadline {
  Clock::time_point arrival;
  Clock::time_point when = Clock::time_point::max();

  // A client's own timer resets the call shortly before ours: its clock started earlier, by the
  // time that the request travelled, and gRPC rounds the time that it sends up by as much as one
  // percent. A reset that close to the deadline is the deadline.
  bool Reached(Clock::time_point now) const {
    if (when == Clock::time_point::max()) return false;
    const Clock::duration total = when - arrival;
    const Clock::duration margin = total / 64 + std::chrono::milliseconds(100);
    return now >= when - std::min(total / 4, margin);
  }
};

Deadline ReadDeadline(const grpc::CallbackServerContext& context) {
  Deadline deadline{Clock::now()};
  const auto wall = context.deadline();
  if (wall == std::chrono::system_clock::time_point::max()) return deadline;
  const auto left = wall - std::chrono::system_clock::now();
  if (left < std::chrono::hours(24 * 365)) {
    deadline.when = deadline.arrival + std::chrono::duration_cast<Clock::duration>(left);
  }
  return deadline;
}

uint64_t RandomSeed() {
  static thread_local std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// What both kinds of call have: the request, its stream, and the answer in the making.
class Answer {
 public:
  Answer(CallEnvironment& environment, RequestOrigin origin, std::shared_ptr<ApiKey> key,
         const Deadline& deadline, ValidatedRequest request, RequestPool::Submitted submitted)
      : environment_(environment),
        origin_(std::move(origin)),
        key_(std::move(key)),
        deadline_(deadline),
        request_(std::move(request)),
        submitted_(std::move(submitted)),
        generation_({.tokenizer = environment.stack.model().tokenizer.get(),
                     .candidates = request_.spec.candidates,
                     .min_new_tokens = request_.spec.min_new_tokens,
                     .stop_strings = request_.stop_strings,
                     .logprobs = request_.spec.top_logprobs >= 0}) {}

  static absl::StatusOr<std::unique_ptr<Answer>> Create(CallEnvironment& environment,
                                                        const grpc::CallbackServerContext& context,
                                                        const grpc::ByteBuffer& bytes) {
    RequestOrigin origin = OriginOf(context);
    auto answer = Admit(environment, context, bytes, origin);
    if (!answer.ok()) environment.request_log.Refused(origin, answer.status());
    return answer;
  }

  // Asks whose call it is, parses, validates and submits. Fills in `origin` as it gets to know it.
  static absl::StatusOr<std::unique_ptr<Answer>> Admit(CallEnvironment& environment,
                                                       const grpc::CallbackServerContext& context,
                                                       const grpc::ByteBuffer& bytes,
                                                       RequestOrigin& origin) {
    const Deadline deadline = ReadDeadline(context);
    TREADLE_ASSIGN_OR_RETURN(std::shared_ptr<ApiKey> key, Authorize(environment, context));
    if (key) origin.key = key->name();
    v1::GenerateRequest message;
    TREADLE_RETURN_IF_ERROR(Parse(bytes, message));
    if (message.request_id().empty()) message.set_request_id(origin.header_id);
    origin.id = message.request_id();
    TREADLE_ASSIGN_OR_RETURN(
        ValidatedRequest request,
        ValidateRequest(message, environment.stack.model(), environment.limits, RandomSeed()));
    request.spec.deadline = deadline.when;
    request.spec.key = origin.key;
    if (key) {
      TREADLE_RETURN_IF_ERROR(
          key->Admit(static_cast<int64_t>(request.spec.prompt.size()), deadline.arrival));
    }
    TREADLE_ASSIGN_OR_RETURN(RequestPool::Submitted submitted,
                             environment.stack.pool().Submit(request.spec));
    return std::make_unique<Answer>(environment, origin, std::move(key), deadline,
                                    std::move(request), std::move(submitted));
  }

  void NotifyThrough(std::weak_ptr<Recipient> recipient) {
    submitted_.stream->SetNotifier([&courier = environment_.courier, recipient] {
      if (auto alive = recipient.lock()) courier.Post(std::move(alive));
    });
  }

  // Whatever the stream has. Once ended() nothing more comes.
  std::vector<OutputPart> Take() {
    if (ended_) return {};
    StreamBatch batch = submitted_.stream->Take();
    prompt_details_.insert(prompt_details_.end(),
                           std::make_move_iterator(batch.prompt_detail.begin()),
                           std::make_move_iterator(batch.prompt_detail.end()));
    Generation::Update update = generation_.Absorb(batch.tokens);
    for (uint32_t candidate : update.stopped) {
      environment_.stack.pool().FinishCandidate(submitted_.id, candidate);
    }
    for (const OutputPart& part : update.parts) {
      if (part.finish != FinishReason::kNone) reasons_[part.candidate] = part.finish;
    }
    if (batch.ended) {
      ended_ = true;
      status_ = batch.status;
      timings_ = batch.timings;
      if (key_) key_->Charge(generation_.completion_tokens());
      LogEnd();
    }
    return std::move(update.parts);
  }

  // The client is gone.
  void Cancel() {
    environment_.stack.pool().Cancel(
        submitted_.id, deadline_.Reached(Clock::now())
                           ? absl::DeadlineExceededError("the deadline passed")
                           : absl::CancelledError("the client cancelled or disconnected"));
  }
  void CancelStalled() {
    environment_.stack.pool().Cancel(
        submitted_.id, absl::CancelledError("the client did not read (--stream-stall-timeout)"));
  }

  void FillPrompt(v1::GenerateResponse& response) const {
    FillPromptInfo(request_.spec, prompt_details_, *response.mutable_prompt_info());
  }
  void FillLast(v1::GenerateResponse& response) const {
    FillEnd(static_cast<int32_t>(request_.spec.prompt.size()), generation_.completion_tokens(),
            timings_, response);
  }

  bool ended() const { return ended_; }
  const absl::Status& status() const { return status_; }
  int32_t candidates() const { return request_.spec.candidates; }
  CallEnvironment& environment() const { return environment_; }

 private:
  void LogEnd() const {
    environment_.request_log.Finished(
        origin_, {.number = submitted_.id,
                  .prompt_tokens = static_cast<int32_t>(request_.spec.prompt.size()),
                  .generated_tokens = generation_.completion_tokens(),
                  .reasons = reasons_,
                  .status = status_,
                  .timings = timings_});
  }

  CallEnvironment& environment_;
  const RequestOrigin origin_;
  const std::shared_ptr<ApiKey> key_;  // null: nobody asks
  const Deadline deadline_;
  const ValidatedRequest request_;
  const RequestPool::Submitted submitted_;
  Generation generation_;
  std::vector<TokenDetail> prompt_details_;
  std::vector<FinishReason> reasons_ = std::vector<FinishReason>(
      static_cast<size_t>(request_.spec.candidates), FinishReason::kNone);  // [candidates]
  bool ended_ = false;
  absl::Status status_;
  RequestTimings timings_;
};

class UnaryCall final : public grpc::ServerUnaryReactor,
                        public Recipient,
                        public std::enable_shared_from_this<UnaryCall> {
 public:
  UnaryCall(std::unique_ptr<Answer> answer, grpc::ByteBuffer* response)
      : environment_(answer->environment()), response_(response), answer_(std::move(answer)) {
    environment_.calls.Add();
  }

  void Begin() {
    MutexLock lock(mutex_);
    self_ = shared_from_this();
    answer_->NotifyThrough(weak_from_this());
  }

  void Deliver() override {
    MutexLock lock(mutex_);
    if (finished_) return;
    for (const OutputPart& part : answer_->Take()) {
      if (part.candidate == 0) {
        AppendOutput(part, *message_.mutable_output());
        continue;
      }
      while (message_.more_candidates_size() < static_cast<int>(part.candidate)) {
        message_.add_more_candidates();
      }
      AppendOutput(part, *message_.mutable_more_candidates(static_cast<int>(part.candidate) - 1));
    }
    if (!answer_->ended()) return;
    finished_ = true;
    if (answer_->status().ok()) {
      answer_->FillPrompt(message_);
      answer_->FillLast(message_);
      *response_ = Serialize(message_);
    }
    Finish(ToGrpcStatus(answer_->status()));
  }

  void OnAlarm() override {}

  void OnCancel() override {
    MutexLock lock(mutex_);
    if (!finished_) answer_->Cancel();
  }

  void OnDone() override {
    std::shared_ptr<UnaryCall> last;  // released after the lock
    {
      MutexLock lock(mutex_);
      last = std::move(self_);
    }
    environment_.calls.Remove();
  }

 private:
  CallEnvironment& environment_;
  grpc::ByteBuffer* const response_;  // gRPC's; valid until Finish

  Mutex mutex_;
  std::shared_ptr<UnaryCall> self_ ABSL_GUARDED_BY(mutex_);  // gRPC's share, until OnDone
  const std::unique_ptr<Answer> answer_ ABSL_GUARDED_BY(mutex_);
  v1::GenerateResponse message_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class StreamCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                         public Recipient,
                         public std::enable_shared_from_this<StreamCall> {
 public:
  StreamCall(std::unique_ptr<Answer> answer, grpc::CallbackServerContext* context)
      : environment_(answer->environment()), context_(context), answer_(std::move(answer)) {
    environment_.calls.Add();
  }

  void Begin() {
    MutexLock lock(mutex_);
    self_ = shared_from_this();
    answer_->NotifyThrough(weak_from_this());
  }

  void Deliver() override {
    MutexLock lock(mutex_);
    Advance();
  }

  void OnWriteDone(bool ok) override {
    MutexLock lock(mutex_);
    writing_ = false;
    if (!ok) Abandon();
    Advance();
  }

  void OnCancel() override {
    MutexLock lock(mutex_);
    Abandon();
    Advance();
  }

  void OnAlarm() override {
    MutexLock lock(mutex_);
    alarm_set_ = false;
    if (finished_ || !writing_) return;
    if (Clock::now() < write_began_ + environment_.stall_timeout) {
      SetAlarm();
      return;
    }
    if (!abandoned_) answer_->CancelStalled();
    abandoned_ = true;
    context_->TryCancel();  // the pending write returns, then the call can finish
  }

  void OnDone() override {
    std::shared_ptr<StreamCall> last;
    {
      MutexLock lock(mutex_);
      last = std::move(self_);
    }
    environment_.calls.Remove();
  }

 private:
  void Abandon() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!abandoned_ && !finished_) answer_->Cancel();
    abandoned_ = true;
  }

  // One write at a time; while it is under way the token stream collects what comes next.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_ || writing_) return;
    if (outbox_.empty()) Refill();
    if (abandoned_) outbox_.clear();
    if (outbox_.empty()) {
      if (!answer_->ended()) return;
      finished_ = true;
      Finish(ToGrpcStatus(answer_->status()));
      return;
    }
    written_ = Serialize(outbox_.front());
    outbox_.pop_front();
    if (answer_->ended() && answer_->status().ok() && outbox_.empty()) {
      finished_ = true;
      StartWriteAndFinish(&written_, grpc::WriteOptions(), grpc::Status::OK);
      return;
    }
    writing_ = true;
    write_began_ = Clock::now();
    if (!alarm_set_) SetAlarm();
    StartWrite(&written_);
  }

  void Refill() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (answer_->ended()) return;
    for (const OutputPart& part : answer_->Take()) {
      AppendOutput(part, *outbox_.emplace_back().mutable_output());
    }
    if (answer_->ended() && answer_->status().ok()) {
      if (outbox_.empty()) outbox_.emplace_back();
      answer_->FillLast(outbox_.back());
    }
    if (!outbox_.empty() && !began_) {
      began_ = true;
      answer_->FillPrompt(outbox_.front());
    }
  }

  // At most one alarm per call is pending: a stream of many short writes does not pay for each.
  void SetAlarm() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    alarm_set_ = true;
    environment_.courier.WakeAt(write_began_ + environment_.stall_timeout, weak_from_this());
  }

  CallEnvironment& environment_;
  grpc::CallbackServerContext* const context_;  // gRPC's; valid until OnDone

  Mutex mutex_;
  std::shared_ptr<StreamCall> self_ ABSL_GUARDED_BY(mutex_);  // gRPC's share, until OnDone
  const std::unique_ptr<Answer> answer_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::GenerateResponse> outbox_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer written_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point write_began_ ABSL_GUARDED_BY(mutex_);
  bool began_ ABSL_GUARDED_BY(mutex_) = false;    // the first message was made
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // a write is under way
  bool alarm_set_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;  // the client is gone; nothing more is written
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;   // Finish was called
};

}  // namespace

grpc::ServerUnaryReactor* StartGenerate(CallEnvironment& environment,
                                        grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* response) {
  auto answer = Answer::Create(environment, *context, *request);
  if (!answer.ok()) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpcStatus(answer.status()));
    return reactor;
  }
  auto call = std::make_shared<UnaryCall>(std::move(*answer), response);
  call->Begin();
  return call.get();
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartGenerateStream(
    CallEnvironment& environment, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request) {
  auto answer = Answer::Create(environment, *context, *request);
  if (!answer.ok()) return RefuseStream<grpc::ByteBuffer>(answer.status());
  auto call = std::make_shared<StreamCall>(std::move(*answer), context);
  call->Begin();
  return call.get();
}

}  // namespace treadle
