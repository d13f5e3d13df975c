#include "server/openai/openai_call.h"

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

// Of X-Request-Timeout, in seconds.
absl::StatusOr<Clock::time_point> DeadlineOf(const HttpRequest& request) {
  constexpr double kLongest = 365 * 24 * 3600;
  const std::string_view text = request.Header("x-request-timeout");
  if (text.empty()) return Clock::time_point::max();
  const std::optional<double> seconds = NumberIn<double>(text);
  if (!seconds || !(*seconds > 0 && *seconds <= kLongest)) {
    return InvalidArgument("the header X-Request-Timeout is ", Quoted(text),
                           ", expected seconds, more than 0 and at most a year");
  }
  return request.arrival +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds));
}

class Call final : public std::enable_shared_from_this<Call> {
 public:
  Call(SessionEnvironment& sessions, bool chat, HttpRequest request,
       std::shared_ptr<HttpReply> reply)
      : sessions_(sessions),
        chat_(chat),
        id_(RequestIdOf(request, chat ? "chatcmpl-" : "cmpl-")),
        http_(std::move(request)),
        reply_(std::move(reply)) {}

  void Start() {
    const auto deadline = DeadlineOf(http_);
    if (!deadline.ok()) return reply_->Send(Told(OpenAiError(deadline.status())));
    deadline_ = *deadline;
    reply_->OnClosed([self = shared_from_this()] { self->Cancel(); });
    const size_t bytes = http_.body.size();
    StartPrompt(bytes, [self = shared_from_this()] { return self->ReadBody(); });
  }

 private:
  class Prompt final : public Session {
   public:
    Prompt(std::shared_ptr<Call> call, size_t index)
        : Session(call->sessions_), call_(std::move(call)), index_(index) {}

   private:
    bool Write(const SessionEvent& event) override { return call_->Write(*this, index_, event); }
    void Fail(const absl::Status& status) override { call_->Fail(status); }
    void BreakWrite() override { call_->reply_->Break(); }

    const std::shared_ptr<Call> call_;
    const size_t index_;
  };

  HttpResponse Told(HttpResponse response) const {
    response.headers.push_back({"X-Request-Id", id_});
    return response;
  }

  // False: the call is over.
  bool StartPrompt(size_t bytes, Session::Read read) ABSL_LOCKS_EXCLUDED(mutex_) {
    std::shared_ptr<Prompt> prompt;
    {
      MutexLock lock(mutex_);
      if (cancelled_ || over_) return false;
      prompt = std::make_shared<Prompt>(shared_from_this(), prompts_.size());
      prompts_.push_back(prompt);
      ++open_;
    }
    prompt->Start({.origin = {.header_id = id_, .client = http_.peer},
                   .authorization = http_.Header("authorization"),
                   .arrival = http_.arrival,
                   .deadline = deadline_},
                  bytes, std::move(read));
    return true;
  }

  // On the work pool, as the first prompt's; starts the others.
  absl::StatusOr<GenerateRequest> ReadBody() ABSL_LOCKS_EXCLUDED(mutex_) {
    auto read = ReadOpenAiRequest(http_.body, chat_, sessions_.model);
    http_.body = {};
    TREADLE_RETURN_IF_ERROR(read.status());
    const auto request = std::make_shared<const OpenAiRequest>(*std::move(read));
    {
      MutexLock lock(mutex_);
      request_ = request;
      answer_.emplace(sessions_.model, *request, id_, std::time(nullptr));
    }
    for (size_t i = 1; i < request->prompts.size(); ++i) {
      const size_t bytes = request->BytesOf(i);
      if (!StartPrompt(bytes, [request, i] { return request->For(i); })) break;
    }
    return request->For(0);
  }

  bool Write(Prompt& prompt, size_t index, const SessionEvent& event) ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    const bool last = event.end != nullptr && Ended();
    if (over_) return true;
    answer_->Add(index, event);
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
    if (events.empty()) return true;
    if (!std::exchange(begun_, true)) {
      // A proxy shall pass on what there is.
      reply_->Begin(
          Told({.content_type = "text/event-stream; charset=utf-8",
                .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}}));
    }
    if (event.end != nullptr) {
      reply_->Write(std::move(events));
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
    HttpResponse error = OpenAiError(shown, chat_, request_ ? request_->max_tokens : "max_tokens");
    if (!begun_) return reply_->Send(Told(std::move(error)), OnDone());
    reply_->Write("data: " + error.body + "\n\n");
    reply_->End(OnDone());
  }

  // A prompt has ended. True: it was the last.
  bool Ended() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (--open_ > 0) return false;
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
  const bool chat_;
  const std::string id_;
  HttpRequest http_;  // its body is gone once it was read
  const std::shared_ptr<HttpReply> reply_;
  Clock::time_point deadline_ = Clock::time_point::max();

  Mutex mutex_;
  std::shared_ptr<const OpenAiRequest> request_ ABSL_GUARDED_BY(mutex_);
  std::optional<OpenAiAnswer> answer_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Prompt>> prompts_ ABSL_GUARDED_BY(mutex_);
  size_t open_ ABSL_GUARDED_BY(mutex_) = 0;         // prompts that have not ended
  bool begun_ ABSL_GUARDED_BY(mutex_) = false;      // a stream's head was sent
  bool over_ ABSL_GUARDED_BY(mutex_) = false;       // nothing more is said
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;  // no further prompt starts
  bool done_ ABSL_GUARDED_BY(mutex_) = false;       // the client has all that was said
};

}  // namespace

std::string RequestIdOf(const HttpRequest& request, const char* prefix) {
  const std::string_view given = request.Header("x-request-id");
  if (!given.empty()) return PrintableId(given);
  static thread_local std::random_device device;
  char digits[25];
  std::snprintf(digits, sizeof digits, "%08x%08x%08x", device(), device(), device());
  return std::string(prefix) + digits;
}

void StartOpenAiCall(SessionEnvironment& sessions, bool chat, HttpRequest request,
                     std::shared_ptr<HttpReply> reply) {
  std::make_shared<Call>(sessions, chat, std::move(request), std::move(reply))->Start();
}

}  // namespace treadle
