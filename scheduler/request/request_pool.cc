#include "scheduler/request/request_pool.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

int64_t StreamCapacity(const RequestSpec& spec) {
  const int64_t prompt = spec.prompt_logprobs >= 0 ? static_cast<int64_t>(spec.prompt.size()) : 0;
  return int64_t{spec.candidates} * spec.max_new_tokens + prompt;
}

}  // namespace

RequestPool::RequestPool(int64_t max_queue) : max_queue_(max_queue) {}

absl::StatusOr<RequestPool::Submitted> RequestPool::Submit(RequestSpec spec) {
  TREADLE_CHECK(!spec.prompt.empty() && spec.max_new_tokens > 0 && spec.candidates > 0);
  auto request = std::make_unique<Request>();
  request->stream = std::make_shared<TokenStream>(StreamCapacity(spec));
  request->sequences.resize(static_cast<size_t>(spec.candidates));
  for (uint32_t i = 0; i < request->sequences.size(); ++i) {
    Sequence& sequence = request->sequences[i];
    sequence.candidate = i;
    if (spec.earlier.empty()) continue;
    sequence.output = std::move(spec.earlier[i].tokens);
    sequence.produced = static_cast<int32_t>(sequence.output.size());
    sequence.finish = spec.earlier[i].finish;
    sequence.finished = sequence.finish != FinishReason::kNone;
  }
  request->spec = std::move(spec);

  MutexLock lock(mutex_);
  if (draining_) return absl::UnavailableError("the server is draining and takes no new requests");
  const int64_t waiting = waiting_ - reserved_ + static_cast<int64_t>(inbox_.arrivals.size());
  if (waiting >= max_queue_) {
    return ResourceExhausted("the queue is full: ", waiting, " requests wait, at most ", max_queue_,
                             " may");
  }
  request->id = next_id_++;
  Submitted submitted{request->id, request->stream};
  inbox_.arrivals.push_back(std::move(request));
  news_.NotifyOne();
  return submitted;
}

void RequestPool::PushCommand(Command command) {
  MutexLock lock(mutex_);
  inbox_.commands.push_back(std::move(command));
  news_.NotifyOne();
}

void RequestPool::Cancel(RequestId id, absl::Status status) {
  PushCommand({Command::Kind::kCancel, id, 0, std::move(status)});
}

void RequestPool::FinishCandidate(RequestId id, uint32_t candidate) {
  PushCommand({Command::Kind::kFinishCandidate, id, candidate, absl::OkStatus()});
}

void RequestPool::ForgetCached() {
  MutexLock lock(mutex_);
  inbox_.forget_cached = woken_ = true;
  news_.NotifyOne();
}

void RequestPool::Drain() {
  MutexLock lock(mutex_);
  draining_ = true;
  woken_ = true;
  news_.NotifyOne();
}

PoolLoad RequestPool::Load() const {
  MutexLock lock(mutex_);
  return {.waiting = waiting_ + static_cast<int64_t>(inbox_.arrivals.size()),
          .reserved = reserved_,
          .running = running_,
          .queue_limit = max_queue_,
          .draining = draining_};
}

void RequestPool::Wake() {
  MutexLock lock(mutex_);
  woken_ = true;
  news_.NotifyOne();
}

void RequestPool::WaitForNews(Clock::time_point deadline) {
  MutexLock lock(mutex_);
  while (!woken_ && inbox_.arrivals.empty() && inbox_.commands.empty()) {
    if (!news_.WaitUntil(mutex_, deadline)) break;
  }
  woken_ = false;
}

RequestPool::Inbox RequestPool::TakeInbox() {
  MutexLock lock(mutex_);
  // Until the loop notes its counts, what it took still waits.
  waiting_ += static_cast<int64_t>(inbox_.arrivals.size());
  Inbox taken = std::exchange(inbox_, {});
  taken.draining = draining_;
  return taken;
}

void RequestPool::NoteCounts(int64_t waiting, int64_t reserved, int64_t running) {
  MutexLock lock(mutex_);
  waiting_ = waiting;
  reserved_ = reserved;
  running_ = running;
}

Request* RequestPool::Find(RequestId id) {
  const auto it = std::lower_bound(live_.begin(), live_.end(), id,
                                   [](const std::unique_ptr<Request>& request, RequestId wanted) {
                                     return request->id < wanted;
                                   });
  return it != live_.end() && (*it)->id == id ? it->get() : nullptr;
}

}  // namespace treadle
