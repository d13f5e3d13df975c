// The draft model of --speculate draft:MODEL (scheduler/speculation/draft_model.h): a checkpoint
// with the served one's vocabulary, on one rank of this process.
//
// Thread safety: call from one thread.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/memory_plan.h"
#include "models/checkpoints/checkpoint.h"
#include "scheduler/speculation/draft_model.h"
#include "server/configuration.h"
#include "server/observe/log_event.h"

namespace treadle {

// Null without a draft model. InvalidArgument if its tokens are not those of `served`, and says
// which is another one; the checkpoint's errors.
absl::StatusOr<std::shared_ptr<const Checkpoint>> CheckDraftModel(const ServeOptions& options,
                                                                  const Checkpoint& served);

struct OpenedDraft {
  std::unique_ptr<DraftModel> model;  // not started
  std::string notice;                 // what it takes
};

// Packs its weights as they are stored, and plans a K/V cache for as many tokens as `served`, whose
// weights are loaded already, has room for. ResourceExhausted if there is not the memory.
absl::StatusOr<OpenedDraft> OpenDraftModel(const Checkpoint& checkpoint,
                                           const ServeOptions& options, const KvMemoryPlan& served,
                                           const LogSink& log);

}  // namespace treadle
