// VllmEngine.GetTokenizer: a model's tokenizer and chat template as a ZIP archive, in pieces.
//
// Thread safety: any thread.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/sync.h"
#include "server/grpc/calls.h"
#include "server/session/served_model.h"

namespace smg::grpc::common {
class GetTokenizerChunk;
}

namespace treadle {

class TokenizerArchive {
 public:
  struct Archive {
    std::string bytes;
    std::string sha256;
  };

  explicit TokenizerArchive(const ServedModel& model) : model_(model) {}

  // Made the first time, which takes its time, and kept. FailedPrecondition if there is none.
  absl::StatusOr<std::shared_ptr<const Archive>> Get() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const ServedModel& model_;
  Mutex mutex_;
  std::shared_ptr<const Archive> made_ ABSL_GUARDED_BY(mutex_);
};

grpc::ServerWriteReactor<smg::grpc::common::GetTokenizerChunk>* StartGetTokenizer(
    CallEnvironment& environment, TokenizerArchive& archive,
    const grpc::CallbackServerContext& context);

}  // namespace treadle
