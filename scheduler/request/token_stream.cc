#include "scheduler/request/token_stream.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/status.h"

namespace treadle {

TokenStream::TokenStream(int64_t capacity) : capacity_(capacity) {}

bool TokenStream::HasNews() const {
  return pending_.ended || !pending_.tokens.empty() || !pending_.prompt_detail.empty();
}

template <typename Add>
void TokenStream::AddNews(size_t entries, const Add& add) {
  Notifier due;
  {
    MutexLock lock(mutex_);
    TREADLE_CHECK(!pending_.ended);
    pushed_ += static_cast<int64_t>(entries);
    TREADLE_CHECK(pushed_ <= capacity_);
    if (!HasNews()) due = notify_;
    add(pending_);
  }
  if (due) (*due)();
}

void TokenStream::SetNotifier(std::function<void()> notify) {
  Notifier due;
  {
    MutexLock lock(mutex_);
    notify_ = std::make_shared<const std::function<void()>>(std::move(notify));
    if (HasNews()) due = notify_;
  }
  if (due) (*due)();
}

StreamBatch TokenStream::Take() {
  MutexLock lock(mutex_);
  StreamBatch taken;
  taken.tokens.swap(pending_.tokens);
  taken.prompt_detail.swap(pending_.prompt_detail);
  taken.ended = pending_.ended;
  taken.status = pending_.status;
  taken.timings = pending_.timings;
  return taken;
}

void TokenStream::Push(StreamToken token) {
  AddNews(1, [&](StreamBatch& pending) { pending.tokens.push_back(std::move(token)); });
}

void TokenStream::PushPrompt(std::vector<TokenDetail> details) {
  if (details.empty()) return;
  AddNews(details.size(), [&](StreamBatch& pending) {
    std::ranges::move(details, std::back_inserter(pending.prompt_detail));
  });
}

void TokenStream::End(absl::Status status, const RequestTimings& timings) {
  Notifier due;
  {
    MutexLock lock(mutex_);
    TREADLE_CHECK(!pending_.ended);
    pending_.ended = true;
    pending_.status = std::move(status);
    pending_.timings = timings;
    due = notify_;
  }
  if (due) (*due)();
}

}  // namespace treadle
