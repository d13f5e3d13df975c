// The ranks of an engine inside this process, each with its backend and its shard of every layer.
//
// Thread safety: call from one thread.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/stage_ranks.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"
#include "server/cli/rank_devices.h"
#include "server/configuration.h"

namespace treadle {

// Makes the ranks' backends and loads their shards at the same time. `progress`: fraction of all,
// from several threads but one at a time; may be empty. Errors: RankDevices::Create's and
// Model::Load's.
absl::StatusOr<std::vector<StageRanks::Rank>> LoadRanks(const Checkpoint& checkpoint,
                                                        const ServeOptions& options,
                                                        const RankDevices& devices,
                                                        int64_t max_context,
                                                        std::function<void(double)> progress);

// How `options` say that a model is loaded; shard 0 of all ranks.
LoadOptions LoadOptionsFrom(const ServeOptions& options, int64_t max_context);

// Threads of one rank when `parts` ranks, over all stages, share the threads of `options`.
int ThreadsOfRank(const ServeOptions& options, int64_t parts);

}  // namespace treadle
