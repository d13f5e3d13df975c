// Loads a model's shards for all ranks of this process at once, so that what they share is read and
// converted once.
//
// Thread safety: a pure function; its threads have ended when it returns.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "models/model.h"

namespace treadle {

// Rank i's model on backends[i]. `options` as for Model::Load, but that the shard is set here, that
// `threads` are those of one rank, and that `progress` is of all (called from any rank's thread,
// one call at a time). Errors: the first rank's that failed by itself.
absl::StatusOr<std::vector<std::unique_ptr<Model>>> LoadModelRanks(
    const Checkpoint& checkpoint, std::span<Backend* const> backends, const LoadOptions& options);

}  // namespace treadle
