#include "server/page/page_routes.h"

#include <atomic>
#include <string>
#include <utility>

#include "base/status.h"
#include "server/openai/openai_errors.h"
#include "server/page/page_files.h"

namespace treadle {
namespace {

// Nothing but the page's own files is loaded, nothing of it is sent elsewhere, no other page shows
// it in a frame, and no text, such as a model's answer, becomes elements or code.
constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'";

HttpRoute FileRoute(const PageFile& file) {
  return {"GET", std::string(file.path), [&file](const HttpRequest& request, const auto& reply) {
            HttpResponse response{.content_type = std::string(file.content_type),
                                  .headers = {{"Cache-Control", "no-cache"},  // ask each time
                                              {"ETag", std::string(file.etag)},
                                              {"Content-Security-Policy", kPolicy},
                                              {"X-Content-Type-Options", "nosniff"},
                                              {"Referrer-Policy", "no-referrer"}}};
            if (request.Header("if-none-match") == file.etag) {
              response.code = 304;
            } else {
              response.body = std::string(file.bytes);
            }
            reply->Send(std::move(response));
          }};
}

HttpResponse TimelineHead() {
  return {.content_type = "application/x-ndjson",
          .headers = {{"Cache-Control", "no-store"}, {"X-Accel-Buffering", "no"}}};
}

// A reader of the ledger, at its own pace: while it takes what was written, records wait in the
// ledger's ring, and those that leave the ring are lost to it. Its connection keeps it.
class Reader : public std::enable_shared_from_this<Reader> {
 public:
  Reader(LedgerFollower& follower, std::shared_ptr<std::atomic<int>> readers,
         std::shared_ptr<HttpReply> reply)
      : follower_(follower),
        readers_(std::move(readers)),
        reply_(std::move(reply)),
        next_(follower.ledger().end()) {}
  ~Reader() { --*readers_; }

  void Begin(std::string first_line) ABSL_LOCKS_EXCLUDED(mutex_) {
    reply_->OnClosed([self = shared_from_this()] {});
    reply_->Begin(TimelineHead());
    {
      MutexLock lock(mutex_);
      Write(std::move(first_line));
    }
    follower_.Subscribe([weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self) self->OnRecords();
      return self != nullptr;
    });
  }

 private:
  static constexpr size_t kRecordsAtOnce = 64;

  void OnRecords() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    Advance();
  }

  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    uint64_t lost = 0;
    const auto records = follower_.ledger().Read(next_, kRecordsAtOnce, lost);
    std::string lines = lost > 0 ? Str("{\"lost\":", lost, "}\n") : "";
    for (const auto& record : records) {
      LedgerRecord shown = *record;
      for (LedgerEnd& end : shown.ends) end.client_id.clear();
      lines += Ledger::ToJson(shown) + "\n";
    }
    if (!lines.empty()) Write(std::move(lines));
  }

  void Write(std::string lines) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    writing_ = true;
    reply_->Write(std::move(lines), [self = shared_from_this()](bool sent) {
      MutexLock lock(self->mutex_);
      self->writing_ = !sent;  // nobody reads what comes after a failure
      self->Advance();
    });
  }

  LedgerFollower& follower_;
  const std::shared_ptr<std::atomic<int>> readers_;
  const std::shared_ptr<HttpReply> reply_;

  Mutex mutex_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
};

HttpRoute TimelineRoute(LedgerFollower& follower, const SessionEnvironment& sessions) {
  const auto readers = std::make_shared<std::atomic<int>>(0);
  return {"GET", "/timeline",
          [&follower, &sessions, readers](const HttpRequest& request,
                                          const std::shared_ptr<HttpReply>& reply) {
            const absl::Status caller =
                sessions.Authorize(request.Header("authorization")).status();
            if (!caller.ok()) return reply->Send(OpenAiError(caller));
            if (request.head_only) return reply->Begin(TimelineHead());  // takes no place
            // Counted by the reader's end.
            const bool full = ++*readers > kTimelineReaders;
            const auto reader = std::make_shared<Reader>(follower, readers, reply);
            if (full) {
              return reply->Send(OpenAiError(absl::ResourceExhaustedError(
                  Str(kTimelineReaders, " readers of /timeline are there, expected fewer"))));
            }
            reader->Begin(Str("{\"running_limit\":", sessions.running_limit,
                              ",\"queue_limit\":", sessions.pool.Load().queue_limit, "}\n"));
          }};
}

}  // namespace

std::vector<HttpRoute> PageRoutes(LedgerFollower& follower, const SessionEnvironment& sessions) {
  std::vector<HttpRoute> routes = {TimelineRoute(follower, sessions)};
  for (const PageFile& file : EmbeddedFiles()) routes.push_back(FileRoute(file));
  return routes;
}

}  // namespace treadle
