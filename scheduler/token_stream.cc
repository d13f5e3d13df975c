#include "scheduler/token_stream.h"

#include <iterator>
#include <utility>

#include "base/status.h"

namespace treadle {

TokenStream::TokenStream(int64_t capacity) : capacity_(capacity) {}

bool TokenStream::HasNews() const {
  return pending_.ended || !pending_.tokens.empty() || !pending_.prompt_detail.empty();
}

TokenStream::Notifier TokenStream::NoteNews(size_t entries) {
  TREADLE_CHECK(!pending_.ended);
  pushed_ += static_cast<int64_t>(entries);
  TREADLE_CHECK(pushed_ <= capacity_);
  return HasNews() ? nullptr : notify_;
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
  Notifier due;
  {
    MutexLock lock(mutex_);
    due = NoteNews(1);
    pending_.tokens.push_back(std::move(token));
  }
  if (due) (*due)();
}

void TokenStream::PushPrompt(std::vector<TokenDetail> details) {
  if (details.empty()) return;
  Notifier due;
  {
    MutexLock lock(mutex_);
    due = NoteNews(details.size());
    pending_.prompt_detail.insert(pending_.prompt_detail.end(),
                                  std::make_move_iterator(details.begin()),
                                  std::make_move_iterator(details.end()));
  }
  if (due) (*due)();
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
