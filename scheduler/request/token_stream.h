// One request's tokens on their way from the serving loop to one server thread.
//
// Capacity is n * max_new_tokens (plus the prompt's length if its log probabilities are asked): the
// request's own limits bound the buffer, so pushing never waits and never fails, and a slow reader
// holds no pages. After End nothing more is pushed.
//
// Thread safety: Push* and End from the serving loop; Take and SetNotifier from the reader's side.
// The notifier runs on the loop's thread, when news meet an empty buffer and at the end (a reader
// takes everything, so once is enough); it must not block.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/sync.h"
#include "engine/plan/iteration_plan.h"

namespace treadle {

enum class FinishReason : uint8_t { kNone, kLength, kEndToken, kStopString, kPooled };

struct StreamToken {
  uint32_t candidate = 0;
  int32_t token = -1;
  TokenDetail detail;
  FinishReason finish = FinishReason::kNone;  // set on the last token of this candidate
  std::vector<float> embedding = {};          // with kPooled, and instead of a token
};

// Measurements of a request by the loop: seconds, and guesses of its tokens (speculation.h).
struct RequestTimings {
  double queued = 0;       // arrival to admission
  double first_token = 0;  // arrival to first token
  double total = 0;        // arrival to end
  int32_t draft_tokens = 0;
  int32_t accepted_draft_tokens = 0;  // the right ones of them
};

// The tokens that the reader takes in one go.
struct StreamBatch {
  std::vector<StreamToken> tokens;
  std::vector<TokenDetail> prompt_detail;  // new entries, in prompt order, from position 1 on
  bool ended = false;
  absl::Status status;     // valid when ended: Ok, or why the request ended early
  RequestTimings timings;  // valid when ended
};

class TokenStream {
 public:
  explicit TokenStream(int64_t capacity);

  // Called once by the reader before anything can arrive, or immediately with what is there.
  void SetNotifier(std::function<void()> notify) ABSL_LOCKS_EXCLUDED(mutex_);
  // Everything since the last Take, and the end, once there is one; never blocks.
  StreamBatch Take() ABSL_LOCKS_EXCLUDED(mutex_);

  void Push(StreamToken token) ABSL_LOCKS_EXCLUDED(mutex_);
  void PushPrompt(std::vector<TokenDetail> details) ABSL_LOCKS_EXCLUDED(mutex_);
  void End(absl::Status status, const RequestTimings& timings) ABSL_LOCKS_EXCLUDED(mutex_);

  // How many of the prompt's tokens were in the prefix cache: noted before the first token is
  // pushed, and read after it was taken.
  void NoteCached(int32_t tokens) { cached_tokens_ = tokens; }
  int32_t cached_tokens() const { return cached_tokens_; }

 private:
  using Notifier = std::shared_ptr<const std::function<void()>>;

  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Counts `entries` against the capacity, has them added, and notifies if they are the first.
  template <typename Add>
  void AddNews(size_t entries, const Add& add) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t capacity_;
  std::atomic<int32_t> cached_tokens_ = 0;

  Mutex mutex_;
  int64_t pushed_ ABSL_GUARDED_BY(mutex_) = 0;
  StreamBatch pending_ ABSL_GUARDED_BY(mutex_);
  Notifier notify_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace treadle
