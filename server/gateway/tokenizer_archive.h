// VllmEngine.GetTokenizer: a model's tokenizer and chat template as a ZIP archive, in pieces. Who
// does not read costs memory: so many calls run at once, each for the time of a stalled write at
// most.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/grpc/calls.h"
#include "server/session/served_model.h"

namespace treadle {

class TokenizerArchive {
 public:
  struct Archive {
    std::string bytes;
    std::string sha256;
  };

  static constexpr int kMaxCalls = 16;

  explicit TokenizerArchive(const ServedModel& model) : model_(model) {}

  // Made the first time, which takes its time, and kept. FailedPrecondition if there is none.
  absl::StatusOr<std::shared_ptr<const Archive>> Get() ABSL_LOCKS_EXCLUDED(mutex_);

  std::atomic<int> calls{0};  // under way

 private:
  const ServedModel& model_;
  Mutex mutex_;
  std::shared_ptr<const Archive> made_ ABSL_GUARDED_BY(mutex_);
};

StreamReactor* StartGetTokenizer(CallEnvironment& environment, TokenizerArchive& archive,
                                 RpcContext* context);

}  // namespace treadle
