// A session: one request's way in and out, whatever protocol its client speaks. It checks the key,
// validates the request and submits it to the pool, watches the deadline and the client, turns
// tokens into text at the client's pace, finds stop strings, and logs one event at the end. A front
// end derives from it and translates.
//
// With --durable, a request that says how it is read again is stored. Its client is told only what
// was written to disk, one event a token, so that the events depend on nothing but the tokens, and
// a session that resumes the request begins with the same ones.
//
// A session is driven by its TokenStream's notifier through the courier. Cancelled (by the client,
// by its deadline, by a stalled write), it ends when the loop has ended the request. The
// table kSessionTransitions says what may happen when.
//
// Thread safety: public methods from any thread, none of them waits. A front end's methods are
// called under the session's mutex, by the courier's thread or by who calls Start, Cancel or
// Written; it must neither block nor call the session.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/sync.h"
#include "scheduler/request/request_pool.h"
#include "server/access/api_keys.h"
#include "server/durable/request_store.h"
#include "server/observe/refusals.h"
#include "server/observe/request_log.h"
#include "server/session/courier.h"
#include "server/session/generation.h"
#include "server/session/request_validation.h"
#include "server/session/served_model.h"
#include "server/session/work_pool.h"

namespace treadle {

// Calls under way, so that shutting down can let the last bytes go out.
class CallCount {
 public:
  void Add() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    ++count_;
  }
  void Remove() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    --count_;
    changed_.NotifyAll();
  }
  // False if `deadline` came before the last call ended.
  bool WaitZero(Clock::time_point deadline) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    while (count_ > 0) {
      if (!changed_.WaitUntil(mutex_, deadline)) return count_ == 0;
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The objects that all sessions of a server share, and that outlive them.
struct SessionEnvironment {
  const ServedModel& model;
  RequestPool& pool;
  const RequestLimits limits = {};
  const int64_t running_limit = limits.max_batch_size;    // sequences in one iteration
  const std::chrono::milliseconds stall_timeout{60'000};  // of one write
  const ApiKeys* const keys = nullptr;                    // null: everybody may call
  const RequestLog request_log;
  const WorkPool::Limits work = {};
  RequestStore* const store = nullptr;  // null: nothing is stored
  const std::shared_ptr<RefusalCounts> refusals = std::make_shared<RefusalCounts>();
  Courier courier{};
  CallCount calls{};
  WorkPool pool_of_work{work};  // last: its work uses the others

  // The key of a call, by "Bearer KEY"; null if everybody may call. Unauthenticated or
  // PermissionDenied otherwise.
  absl::StatusOr<std::shared_ptr<ApiKey>> KeyOf(std::string_view authorization) const;
  // The same for a call that generates nothing: counts it if it is refused.
  absl::StatusOr<std::shared_ptr<ApiKey>> Authorize(std::string_view authorization) const;
  // Whether it is an operator's key: what follows changes the server. PermissionDenied otherwise,
  // also where everybody may call.
  absl::Status CheckOperator(std::string_view authorization) const;
  // The key's owner; empty if everybody may call.
  absl::StatusOr<std::string> OwnerOf(std::string_view authorization) const;
  // Charges the caller's key for a call, and lets `work` over so many bytes wait for its turn.
  // Authorize's errors, the key's and the pool's, which are counted.
  absl::Status Submit(std::string_view authorization, RequestOrigin origin, size_t bytes,
                      std::function<void()> work);
};

// The owner of a call's work, with whom it shares a turn: its key; without keys, its address.
std::string FairShareOf(const RequestOrigin& origin);

// The origin of a call, known before its request is read.
struct Caller {
  RequestOrigin origin = {};         // but for the key and the id
  std::string_view authorization{};  // valid during Start
  Clock::time_point arrival = Clock::now();
  Clock::time_point deadline = Clock::time_point::max();
};

// The request that a client resumes, and from where.
struct ResumePoint {
  std::string id;          // of the request
  int64_t from_token = 0;  // the first, over all candidates, that is to be told
  // Reads the request again, as it was asked.
  std::function<absl::StatusOr<GenerateRequest>(const StoredRequest&)> read;
};

// An event of a session, in this order. The first has `prompt`, the last one `end`; pointers are
// valid while it is written.
struct SessionEvent {
  struct Prompt {
    const RequestSpec& request;               // as resolved: prompt, seed, lengths
    const std::vector<TokenDetail>& details;  // of prompt tokens 1.., if they were asked
    int32_t cached_tokens = 0;                // of the prompt, which were in the prefix cache
    RequestId number = 0;                     // in the ledger; 0: all was stored, nothing runs
  };
  struct End {
    int32_t prompt_tokens = 0;
    int32_t cached_tokens = 0;      // as of Prompt
    int32_t completion_tokens = 0;  // over all candidates
    RequestTimings timings;
  };
  const Prompt* prompt = nullptr;
  const OutputPart* output = nullptr;  // what is new of one candidate; null: the end brings nothing
  const End* end = nullptr;
};

// The phase of a session: what it waits for. Where its client has left, nothing more is written.
enum class SessionPhase : uint8_t {
  kUnread,  // its turn to be read, validated and submitted
  kUnreadLeft,
  kWaiting,  // news of the loop
  kWaitingLeft,
  kStoring,  // the disk, which gets news before the client does (--durable)
  kStoringLeft,
  kWriting,  // the client, to whom something is written
  kWritingLeft,
  kOver,  // nothing: the front end was told the end
};

enum class SessionStep : uint8_t {
  kSubmit,   // the pool has the request
  kStore,    // news go to the disk
  kStored,   // they are there
  kWrite,    // an event is under way to the client
  kWritten,  // and there, or lost
  kLeave,    // the client is gone, reads no more, or another call has resumed its request
  kEnd,      // the front end is told the end
};

struct SessionTransition {
  SessionPhase from;
  SessionStep step;
  SessionPhase to;
};

// The events that may happen in a phase, and the phase that follows. Anything else is a bug.
inline constexpr SessionTransition kSessionTransitions[] = {
    {SessionPhase::kUnread, SessionStep::kSubmit, SessionPhase::kWaiting},
    {SessionPhase::kUnread, SessionStep::kLeave, SessionPhase::kUnreadLeft},
    {SessionPhase::kUnread, SessionStep::kEnd, SessionPhase::kOver},  // it was refused
    {SessionPhase::kUnreadLeft, SessionStep::kEnd, SessionPhase::kOver},
    {SessionPhase::kWaiting, SessionStep::kStore, SessionPhase::kStoring},
    {SessionPhase::kWaiting, SessionStep::kWrite, SessionPhase::kWriting},
    {SessionPhase::kWaiting, SessionStep::kLeave, SessionPhase::kWaitingLeft},
    {SessionPhase::kWaiting, SessionStep::kEnd, SessionPhase::kOver},
    {SessionPhase::kWaitingLeft, SessionStep::kStore, SessionPhase::kStoringLeft},
    {SessionPhase::kWaitingLeft, SessionStep::kEnd, SessionPhase::kOver},
    {SessionPhase::kStoring, SessionStep::kStored, SessionPhase::kWaiting},
    {SessionPhase::kStoring, SessionStep::kLeave, SessionPhase::kStoringLeft},
    {SessionPhase::kStoringLeft, SessionStep::kStored, SessionPhase::kWaitingLeft},
    {SessionPhase::kWriting, SessionStep::kWritten, SessionPhase::kWaiting},
    {SessionPhase::kWriting, SessionStep::kLeave, SessionPhase::kWritingLeft},
    {SessionPhase::kWritingLeft, SessionStep::kWritten, SessionPhase::kWaitingLeft},
    {SessionPhase::kOver, SessionStep::kWritten, SessionPhase::kOver},  // the last event
};

class Session : public Recipient, public std::enable_shared_from_this<Session> {
 public:
  using Read = std::function<absl::StatusOr<GenerateRequest>()>;

  explicit Session(SessionEnvironment& environment) : environment_(environment) {}

  // Once, and first: asks whose call it is, then lets `read` read the request of so many `bytes`,
  // on a thread of the work pool, and takes it in. It keeps itself until Release, which the front
  // end calls at the very end; what `read` refers to must last until Fail or the end. A call that
  // is refused before it is read ends with Fail before this returns.
  void Start(Caller caller, size_t bytes, Read read) ABSL_LOCKS_EXCLUDED(mutex_);
  // Instead: lets the client have the rest of a stored request. A session that has it lets go
  // first. `point` may be an error of what the client sent, for a caller who may call.
  void Resume(Caller caller, absl::StatusOr<ResumePoint> point) ABSL_LOCKS_EXCLUDED(mutex_);
  // The client is gone, or its time is over.
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);
  // The write that was under way is over; if not `ok`, the client is gone.
  void Written(bool ok) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release() ABSL_LOCKS_EXCLUDED(mutex_);
  SessionPhase phase() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    return phase_;
  }

  void Deliver() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnAlarm() override ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  // True: done. False: it is under way, nothing more is written before Written (while it lasts, the
  // token stream collects what comes next). With `event.end` the call has ended well, and nothing
  // follows.
  virtual bool Write(const SessionEvent& event) = 0;
  // The call ends without an answer, or without the rest of it; nothing follows. Ok only for a
  // client that is gone.
  virtual void Fail(const absl::Status& status) = 0;
  // The client does not read: breaks the write that is under way; Written comes nevertheless.
  virtual void BreakWrite() {}
  // Within Write: ends a candidate, of which nothing more is wanted. A few tokens may still come.
  void EndCandidate(uint32_t candidate) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    environment_.pool.FinishCandidate(submitted_.id, candidate);
  }

 private:
  void Begin(Caller caller, size_t bytes, std::function<void()> take_in)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // On a thread of the work pool. `resumed`: null for a new request.
  void TakeIn(const Read& read) ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeInStored(const std::shared_ptr<const ResumePoint>& point) ABSL_LOCKS_EXCLUDED(mutex_);
  // Goes on with TryConstraint, once the request's adapter is loaded.
  void TakeAdapter(absl::StatusOr<GenerateRequest> read,
                   std::shared_ptr<RequestStore::Resumed> resumed) ABSL_LOCKS_EXCLUDED(mutex_);
  // Goes on with Admit, at once unless there is a constraint that must be tried first.
  void TryConstraint(absl::StatusOr<GenerateRequest> read,
                     std::shared_ptr<RequestStore::Resumed> resumed) ABSL_LOCKS_EXCLUDED(mutex_);
  void Admit(absl::StatusOr<GenerateRequest> read, RequestStore::Resumed* resumed)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Submit(const absl::StatusOr<ValidatedRequest>& valid, StoredRequest kept,
                      RequestStore::Resumed* resumed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // How the loop has ended the request.
  struct RequestEnd {
    absl::Status status;
    RequestTimings timings;
  };
  // Tells again what was stored, and notes it in `spec`. False: that was all.
  absl::StatusOr<bool> Replay(const StreamBatch& answer, RequestSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  RequestStore::Holder Holder(std::string id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CutOff() ABSL_LOCKS_EXCLUDED(mutex_);
  void NoteStored(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void Refuse(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Without an answer, or without the rest of it.
  void End(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Become(SessionStep step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Left() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // waits for the loop
  // Why the request goes no further; ok: the client waits for it.
  absl::Status Gone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WhyGone() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the request, for which nobody waits any more. False: nobody did before, or it is over.
  bool Leave(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StreamBatch TakeStored() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Collect() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Absorb(const std::vector<StreamToken>& tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteEnd(RequestEnd end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WatchWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SessionEnvironment& environment_;

  Mutex mutex_;  // also shows ThreadSanitizer the hand-offs between a front end's threads and ours
  std::shared_ptr<Session> self_ ABSL_GUARDED_BY(mutex_);
  SessionPhase phase_ ABSL_GUARDED_BY(mutex_) = SessionPhase::kUnread;

  // Constant once the request was taken in.
  RequestOrigin origin_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<ApiKey> key_ ABSL_GUARDED_BY(mutex_);  // null: nobody asks
  size_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;             // as the work pool counts them
  Clock::time_point arrival_ ABSL_GUARDED_BY(mutex_);
  Clock::time_point deadline_ ABSL_GUARDED_BY(mutex_) = Clock::time_point::max();
  RequestSpec spec_ ABSL_GUARDED_BY(mutex_);     // without the hold of its adapter
  AdapterHold adapter_ ABSL_GUARDED_BY(mutex_);  // until the pool has it
  RequestPool::Submitted submitted_ ABSL_GUARDED_BY(mutex_);

  std::optional<Generation> generation_ ABSL_GUARDED_BY(mutex_);
  std::vector<TokenDetail> prompt_details_ ABSL_GUARDED_BY(mutex_);
  std::vector<FinishReason> reasons_ ABSL_GUARDED_BY(mutex_);  // [candidates]
  std::vector<OutputPart> parts_ ABSL_GUARDED_BY(mutex_);      // from next_part_ on to be written
  size_t next_part_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t events_ ABSL_GUARDED_BY(mutex_) = 0;               // written so far
  std::optional<RequestEnd> ended_ ABSL_GUARDED_BY(mutex_);  // by the loop
  Clock::time_point write_began_ ABSL_GUARDED_BY(mutex_);

  // The stored form of the request.
  std::unique_ptr<RequestStore::Stream> stored_ ABSL_GUARDED_BY(mutex_);  // null: it is not
  StreamBatch batch_ ABSL_GUARDED_BY(mutex_);  // from the stream, not stored yet
  std::optional<StreamBatch> stored_batch_ ABSL_GUARDED_BY(mutex_);  // to be told
  absl::Status not_stored_ ABSL_GUARDED_BY(mutex_);  // why the request was not accepted
  int64_t from_token_ ABSL_GUARDED_BY(mutex_) = 0;   // the client has those before
  int32_t replayed_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::shared_ptr<const ResumePoint> again_ ABSL_GUARDED_BY(mutex_);  // at the next alarm
};

}  // namespace treadle
