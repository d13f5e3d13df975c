#include <atomic>
#include <utility>

#include "base/status.h"
#include "base/sync.h"
#include "bench/load/load_replay.h"
#include "scheduler/request/request_pool.h"

namespace treadle {
namespace {

std::string ErrorText(const absl::Status& status) {
  return Str("code ", static_cast<int>(status.code()), ": ", std::string(status.message()));
}

// Takes what a stream has whenever it has news. The notifier may run on the sender's thread and on
// the loop's at the same time, once each.
class Reader {
 public:
  Reader(TokenStream& stream, LoadAnswer& answer) : stream_(stream), answer_(answer) {}

  void Read() ABSL_LOCKS_EXCLUDED(mutex_) {
    MutexLock lock(mutex_);
    if (ended_) return;
    const StreamBatch batch = stream_.Take();
    if (!batch.tokens.empty()) Receive(batch.tokens);
    if (!batch.ended) return;
    ended_ = true;
    answer_.ended(batch.status.ok() ? "" : ErrorText(batch.status));
  }

 private:
  void Receive(const std::vector<StreamToken>& tokens) {
    std::vector<int32_t> ids;
    for (const StreamToken& token : tokens) ids.push_back(token.token);
    answer_.received(static_cast<int32_t>(ids.size()), ids);
  }

  TokenStream& stream_;  // owns the notifier that owns this
  LoadAnswer& answer_;
  Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

class LocalTarget final : public LoadTarget {
 public:
  LocalTarget(RequestPool& pool, const Limits& limits, std::vector<int32_t> end_tokens)
      : pool_(pool), limits_(limits), end_tokens_(std::move(end_tokens)) {}

  absl::StatusOr<Limits> GetLimits(std::chrono::seconds) override { return limits_; }

  void Send(LoadRequest request, LoadAnswer& answer) override {
    RequestSpec spec;
    spec.prompt = std::move(request.token_ids);
    spec.max_new_tokens = request.max_new_tokens;
    spec.sampling.temperature = request.temperature;
    spec.sampling.seed = sent_.fetch_add(1);
    if (!request.ignore_eos) spec.end_tokens = end_tokens_;
    spec.deadline = Clock::now() + request.timeout;
    absl::StatusOr<RequestPool::Submitted> submitted = pool_.Submit(std::move(spec));
    if (!submitted.ok()) return answer.ended(ErrorText(submitted.status()));
    answer.sent();
    TokenStream& stream = *submitted->stream;
    stream.SetNotifier([reader = std::make_shared<Reader>(stream, answer)] { reader->Read(); });
  }

 private:
  RequestPool& pool_;
  const Limits limits_;
  const std::vector<int32_t> end_tokens_;
  std::atomic<uint64_t> sent_ = 0;
};

}  // namespace

std::unique_ptr<LoadTarget> LoadInProcess(RequestPool& pool, const LoadTarget::Limits& limits,
                                          std::vector<int32_t> end_tokens) {
  return std::make_unique<LocalTarget>(pool, limits, std::move(end_tokens));
}

}  // namespace treadle
