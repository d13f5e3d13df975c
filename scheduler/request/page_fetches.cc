#include "scheduler/request/page_fetches.h"

#include <algorithm>
#include <utility>

#include "scheduler/request/progress.h"

namespace treadle {
namespace {

// Rows of an iteration that tells what a prompt's token takes: all of them read weights once.
constexpr int64_t kEnoughRows = 16;

}  // namespace

Clock::time_point PageFetches::Turn(std::span<const std::unique_ptr<Request>> requests,
                                    Clock::time_point now) {
  Clock::time_point next = Clock::time_point::max();
  if (kv_.files() == nullptr) return next;
  int64_t room = std::max<int64_t>(1, kMaxBytes / kv_.files()->page_bytes());  // for pages
  for (const auto& request : requests) {
    if (request->state == RequestState::kFinished) continue;
    room -= static_cast<int64_t>(request->pages_asked);
  }
  for (const auto& request : requests) {
    if (request->state == RequestState::kFinished) continue;
    if (request->state == RequestState::kWaiting && !request->looked_for_pages && room > 0) {
      Begin(*request, room, now);
      room -= static_cast<int64_t>(request->pages_asked);
    }
    if (request->fetch == nullptr) continue;
    if (request->fetch->over() || now >= request->fetch_until) {
      request->fetched = std::exchange(request->fetch, nullptr)->Take();
      request->pages_asked = request->fetched.size();
    } else {
      next = std::min(next, request->fetch_until);
    }
  }
  return next;
}

void PageFetches::Begin(Request& request, int64_t most, Clock::time_point now) {
  request.looked_for_pages = true;
  PageFiles& files = *kv_.files();
  const std::span<const int32_t> ids = ReusableInputs(request);
  const int32_t kept = kv_.Find({request.spec.cache_salt, ids, request.spec.adapter}).tokens;
  if (std::ssize(ids) - kept < files.page_size()) return;
  std::vector<PageName> names = files.NamesOf(request.spec.cache_salt, ids);
  const auto first = static_cast<size_t>(kept / files.page_size());
  names.erase(names.begin(), names.begin() + static_cast<ptrdiff_t>(first));
  names.resize(std::min(static_cast<size_t>(most), files.Held(names)));
  if (names.empty() || !files.PaysToRead()) return;
  const double computing = files.costs().compute * static_cast<double>(names.size());
  request.fetch_until = now + kMaxWait;
  if (computing > 0 && computing < std::chrono::duration<double>(kMaxWait).count()) {
    request.fetch_until =
        now + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(computing));
  }
  request.first_fetched = first;
  request.pages_asked = names.size();
  request.fetch = files.Fetch(std::move(names), [bell = bell_] {
    MutexLock lock(bell->mutex);
    if (bell->wake) bell->wake();
  });
}

void PageFetches::NoteIteration(int64_t rows, double seconds) {
  if (kv_.files() == nullptr || rows < kEnoughRows) return;
  kv_.files()->NoteComputing(seconds / static_cast<double>(rows));
}

int32_t WithFetched(const Request& request, int32_t kept, int64_t page_size) {
  const auto first = static_cast<int64_t>(request.first_fetched);
  if (first * page_size > kept) return kept;  // the cache has lost what was between
  const int64_t end = (first + std::ssize(request.fetched)) * page_size;
  return static_cast<int32_t>(std::max<int64_t>(kept, end));
}

}  // namespace treadle
