#include "server/openai/openai_call.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "server/openai/openai_answer.h"
#include "server/openai/openai_errors.h"
#include "server/openai/openai_request.h"

namespace treadle {
namespace {

// The deadline that the header X-Request-Timeout sets, in seconds from the arrival on.
absl::StatusOr<Clock::time_point> DeadlineOf(const HttpRequest& request) {
  constexpr double kMaxSeconds = 365 * 24 * 3600;
  const std::string_view text = request.Header("x-request-timeout");
  if (text.empty()) return Clock::time_point::max();
  const std::optional<double> seconds = NumberIn<double>(text);
  if (!seconds || !(*seconds > 0 && *seconds <= kMaxSeconds)) {
    return InvalidArgument("the header X-Request-Timeout is ", Quoted(text),
                           ", expected seconds, more than 0 and at most a year");
  }
  return request.arrival +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds));
}

constexpr const char* kKinds[] = {"completion", "chat"};  // of stored requests, by OpenAiKind

class OpenAiApi final : public HttpApi {
 public:
  OpenAiApi(const ServedModel& model, OpenAiKind kind) : model_(model), kind_(kind) {}

  const char* id_prefix() const override {
    constexpr const char* kPrefixes[] = {"cmpl-", "chatcmpl-", "embd-"};  // by OpenAiKind
    return kPrefixes[static_cast<size_t>(kind_)];
  }
  const char* stored_kind() const override {
    return kind_ == OpenAiKind::kEmbedding ? nullptr : kKinds[static_cast<size_t>(kind_)];
  }
  absl::StatusOr<OpenAiRequest> Read(std::string_view body) override {
    return kind_ == OpenAiKind::kEmbedding
               ? ReadEmbeddings(body, model_)
               : ReadOpenAiRequest(body, kind_ == OpenAiKind::kChat, model_);
  }
  std::unique_ptr<HttpAnswer> Answer(const OpenAiRequest& request, const std::string& id,
                                     int64_t created) override {
    return std::make_unique<OpenAiAnswer>(model_, request, id, created);
  }
  HttpResponse Error(const absl::Status& status, const OpenAiRequest* request) const override {
    return OpenAiError(status, kind_, request != nullptr ? request->max_tokens : "max_tokens");
  }

 private:
  const ServedModel& model_;
  const OpenAiKind kind_;
};

// A stream's event, as Last-Event-ID names it.
struct EventId {
  std::string request;
  uint64_t number = 0;  // from 1 on
};
absl::StatusOr<EventId> EventIdIn(std::string_view text) {
  const size_t colon = text.rfind(':');
  const auto number =
      colon == text.npos ? std::nullopt : NumberIn<uint64_t>(text.substr(colon + 1));
  if (number) return EventId{std::string(text.substr(0, colon)), *number};
  return InvalidArgument("the header Last-Event-ID is ", Quoted(text),
                         ", expected the id of the last event that came, or ID:0 for all of them");
}

// The call's name for the client and the log: its X-Request-Id, or a new one.
std::string RequestIdOf(const HttpRequest& request, const char* prefix) {
  const std::string_view given = request.Header("x-request-id");
  return given.empty() ? NewId(prefix) : PrintableId(given);
}

class Call final : public std::enable_shared_from_this<Call> {
 public:
  Call(SessionEnvironment& sessions, std::unique_ptr<HttpApi> api, HttpRequest request,
       std::shared_ptr<HttpReply> reply)
      : sessions_(sessions),
        api_(std::move(api)),
        stored_kind_(sessions.store == nullptr ? nullptr : api_->stored_kind()),
        resumed_(LastEventId(request)),
        id_(resumed_ && resumed_->ok() ? (*resumed_)->request
                                       : RequestIdOf(request, api_->id_prefix())),
        http_(std::move(request)),
        body_bytes_(http_.body.size()),
        reply_(std::move(reply)) {}

  void Start() {
    const auto deadline = DeadlineOf(http_);
    if (!deadline.ok()) {
      return reply_->Send(Told(api_->Error(sessions_.refusals->Add(deadline.status()), nullptr)));
    }
    deadline_ = *deadline;
    reply_->OnClosed([self = shared_from_this()] { self->Cancel(); });
    StartMore();
  }

 private:
  // The header of a client that wants the rest of a stored request's answer.
  std::optional<absl::StatusOr<EventId>> LastEventId(const HttpRequest& request) const {
    const std::string_view text = request.Header("last-event-id");
    if (sessions_.store == nullptr || text.empty()) return std::nullopt;
    return EventIdIn(text);
  }

  class Prompt final : public Session {
   public:
    Prompt(std::shared_ptr<Call> call, size_t index)
        : Session(call->sessions_), call_(std::move(call)), index_(index) {}

    using Session::EndCandidate;

   private:
    bool Write(const SessionEvent& event) override {
      const bool done = call_->Write(*this, index_, event);
      if (event.end != nullptr) call_->StartMore();
      return done;
    }
    void Fail(const absl::Status& status) override { call_->Fail(status); }
    void BreakWrite() override { call_->reply_->Break(); }

    const std::shared_ptr<Call> call_;
    const size_t index_;
  };

  HttpResponse Told(HttpResponse response) const {
    response.headers.push_back({api_->id_header(), id_});
    if (number_ != 0) response.headers.push_back({"X-Request-Number", Str(number_)});
    return response;
  }

  // Whether prompts wait for others to end: only so many may be open at once.
  bool MoreToStart() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const size_t all = request_ ? request_->prompts.size() : 1;
    return !cancelled_ && !over_ && prompts_.size() < all;
  }
  void StartMore() ABSL_LOCKS_EXCLUDED(mutex_) {
    while (true) {
      std::shared_ptr<const OpenAiRequest> request;
      std::shared_ptr<Prompt> prompt;
      const size_t index = Add(request, prompt);
      if (!prompt) return;
      Caller caller{.authorization = http_.Header("authorization"),
                    .arrival = http_.arrival,
                    .deadline = deadline_};
      caller.origin.header_id = id_;
      caller.origin.client = http_.peer;
      if (resumed_) {
        prompt->Resume(std::move(caller), PointToResume());
        continue;
      }
      Session::Read read = [self = shared_from_this()] { return self->ReadBody(); };
      if (request) read = [request, index] { return request->For(index); };
      prompt->Start(std::move(caller), request ? request->BytesOf(index) : body_bytes_,
                    std::move(read));
    }
  }
  // The next prompt; none if it must wait, or there is none.
  size_t Add(std::shared_ptr<const OpenAiRequest>& request, std::shared_ptr<Prompt>& prompt)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    const size_t index = prompts_.size();
    if (open_ >= kMaxPrompts || !MoreToStart()) return index;
    request = request_;
    prompt = prompts_.emplace_back(std::make_shared<Prompt>(shared_from_this(), index));
    ++open_;
    return index;
  }

  // On the work pool, as the first prompt's; starts the others.
  absl::StatusOr<GenerateRequest> ReadBody() ABSL_LOCKS_EXCLUDED(mutex_) {
    auto read = api_->Read(http_.body);
    std::string body = std::exchange(http_.body, {});
    TREADLE_RETURN_IF_ERROR(read.status());
    // Several prompts have no order among their events that could be resumed.
    const bool stored = stored_kind_ != nullptr && read->prompts.size() == 1;
    GenerateRequest first = Take(*std::move(read), std::time(nullptr),
                                 stored ? std::optional(uint64_t{0}) : std::nullopt);
    if (stored) {
      first.kind = stored_kind_;
      first.body = std::move(body);
    }
    return first;
  }
  absl::StatusOr<ResumePoint> PointToResume() {
    TREADLE_RETURN_IF_ERROR(resumed_->status());
    return ResumePoint{.id = (*resumed_)->request,
                       .read = [self = shared_from_this()](const StoredRequest& stored) {
                         return self->ReadStored(stored);
                       }};
  }
  absl::StatusOr<GenerateRequest> ReadStored(const StoredRequest& stored)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    if (std::ranges::count(kKinds, stored.kind) == 0) {
      return absl::FailedPreconditionError(
          "the request was asked over gRPC, expected to be resumed there");
    }
    // A client that sends its request again means that one.
    const bool same = stored_kind_ != nullptr && stored.kind == stored_kind_ &&
                      SameRequest(stored.body, http_.body);
    if (http_.path != kResumePath && !same) {
      return InvalidArgument("the body is not the one of the request ", Quoted(stored.id),
                             " that Last-Event-ID names, expected the same body and path, GET ",
                             kResumePath, ", or no Last-Event-ID for another request");
    }
    TREADLE_ASSIGN_OR_RETURN(
        OpenAiRequest read,
        ReadOpenAiRequest(stored.body, stored.kind == kKinds[1], sessions_.model));
    return Take(std::move(read), stored.created, (*resumed_)->number);
  }
  // `from`: the event after which the stream goes on; none: events have no numbers.
  GenerateRequest Take(OpenAiRequest read, int64_t created, std::optional<uint64_t> from)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    const auto request = std::make_shared<const OpenAiRequest>(std::move(read));
    {
      MutexLock lock(mutex_);
      request_ = request;
      answer_ = api_->Answer(*request, id_, created);
      if (from) answer_->NumberEvents(*from);
    }
    StartMore();
    return request->For(0);
  }

  bool Write(Prompt& prompt, size_t index, const SessionEvent& event) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    const bool last = event.end != nullptr && Ended();
    if (event.prompt != nullptr && index == 0) number_ = event.prompt->number;
    if (over_) return true;
    if (answer_->Add(index, event)) prompt.EndCandidate(event.output->candidate);
    over_ = last;
    if (!request_->stream) {
      if (last) {
        reply_->Send(Told({.content_type = "application/json", .body = answer_->Whole()}),
                     OnDone());
      }
      return true;
    }
    std::string events = answer_->TakeEvents();
    if (last) events += answer_->LastEvents();
    if (events.empty() && !last) return true;
    if (!std::exchange(begun_, true)) {
      // A proxy shall pass on what there is.
      reply_->Begin(Told({.content_type = "text/event-stream; charset=utf-8",
                          .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}},
                          .filler = ":\n\n"}));
    }
    if (event.end != nullptr) {
      if (!events.empty()) reply_->Write(std::move(events));
    } else {
      reply_->Write(std::move(events),
                    [session = prompt.shared_from_this()](bool sent) { session->Written(sent); });
    }
    if (last) reply_->End(OnDone());
    return false;
  }

  // One prompt that fails is the call's end.
  void Fail(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    Ended();
    if (std::exchange(over_, true)) return;
    const absl::Status shown = status.ok() ? absl::CancelledError("the client is gone") : status;
    HttpResponse error = api_->Error(shown, request_.get());
    if (resumed_ && absl::IsNotFound(shown)) {  // else that is a model
      error = OpenAiRefusal(404, std::string(shown.message()));
    }
    if (!begun_) return reply_->Send(Told(std::move(error)), OnDone());
    reply_->Write(answer_->ErrorEvent(error));
    reply_->End(OnDone());
  }

  // A prompt has ended. True: it was the last.
  bool Ended() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (--open_ > 0 || MoreToStart()) return false;
    // Not now: a session may not be called by itself.
    if (done_) reply_->Write({}, [self = shared_from_this()](bool) { self->Release(); });
    return true;
  }

  // All has been said, or never will be.
  HttpReply::Done OnDone() {
    return [self = shared_from_this()] {
      self->Cancel();
      bool all;
      {
        MutexLock lock(self->mutex_);
        self->done_ = true;
        all = self->open_ == 0;
      }
      if (all) self->Release();
    };
  }

  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::shared_ptr<Prompt>> prompts;
    {
      MutexLock lock(mutex_);
      cancelled_ = true;
      prompts = prompts_;
    }
    for (const auto& prompt : prompts) prompt->Cancel();
  }

  void Release() ABSL_LOCKS_EXCLUDED(mutex_) {
    std::vector<std::shared_ptr<Prompt>> prompts;
    {
      MutexLock lock(mutex_);
      prompts.swap(prompts_);
    }
    for (const auto& prompt : prompts) prompt->Release();
  }

  SessionEnvironment& sessions_;
  const std::unique_ptr<HttpApi> api_;
  const char* const stored_kind_;                         // null: the request is not stored
  const std::optional<absl::StatusOr<EventId>> resumed_;  // none: a new request
  const std::string id_;
  HttpRequest http_;  // its body is gone once it was read
  const size_t body_bytes_;
  const std::shared_ptr<HttpReply> reply_;
  Clock::time_point deadline_ = Clock::time_point::max();
  std::atomic<RequestId> number_ = 0;  // of the first prompt, in the ledger; 0: none yet

  Mutex mutex_;
  std::shared_ptr<const OpenAiRequest> request_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<HttpAnswer> answer_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Prompt>> prompts_ ABSL_GUARDED_BY(mutex_);
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;         // prompts that have begun and not ended
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;      // a stream's head was sent
  bool over_ ABSL_GUARDED_BY(mutex_) = false;       // nothing more is said
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // no further prompt starts
  bool done_ ABSL_GUARDED_BY(mutex_) = false;       // the client has all that was said
};

}  // namespace

std::string NewId(const std::string& prefix) {
  static thread_local std::random_device device;
  char digits[25];
  std::snprintf(digits, sizeof digits, "%08x%08x%08x", device(), device(), device());
  return prefix + digits;
}

void StartCall(SessionEnvironment& sessions, std::unique_ptr<HttpApi> api, HttpRequest request,
               std::shared_ptr<HttpReply> reply) {
  std::make_shared<Call>(sessions, std::move(api), std::move(request), std::move(reply))->Start();
}

void StartOpenAiCall(SessionEnvironment& sessions, OpenAiKind kind, HttpRequest request,
                     std::shared_ptr<HttpReply> reply) {
  StartCall(sessions, std::make_unique<OpenAiApi>(sessions.model, kind), std::move(request),
            std::move(reply));
}

}  // namespace treadle
