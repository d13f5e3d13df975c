// Tensor parallelism: which heads, features and vocabulary rows a rank holds, and whether a model
// can be cut that way.
//
// As in Megatron-LM (Shoeybi et al.) and ORCA section 4.1: Q, K, V, gate and up are column-parallel
// (their output features are cut), the attention's output and the down projection row-parallel
// (their input features are cut; partial sums are all-reduced, the bias is added by rank 0),
// embedding and head are cut along the vocabulary. Where there are more ranks than K/V heads,
// size / kv_heads ranks hold the same one.
//
// Thread safety: pure functions.
#pragma once

#include "absl/status/status.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"

namespace treadle {

// Part shard.rank of [0, total), in multiples of `unit` (the last part takes what is left over):
// contiguous, ascending, none empty if total >= size * unit.
ShardRange PartOf(int64_t total, int64_t unit, Shard shard);

ShardRange QueryHeads(const ModelConfig& config, Shard shard);
ShardRange KvHeads(const ModelConfig& config, Shard shard);
// Key heads of states. Of Mamba 2, more ranks than there are hold the same one, with a part of its
// value heads each, where these divide.
ShardRange StateKeyHeads(const ModelConfig& config, Shard shard);
bool SharesKeyHeads(const ModelConfig& config, int size);
// The feed-forward network's inner features: cut where every layer's down projection, in the format
// it is loaded in, can be, and at whole 64s where there are enough of them (so that blocks of
// weights and activations stay as they are on one rank).
ShardRange FfnFeatures(const Checkpoint& checkpoint, const WeightPlan& weights, Shard shard,
                       int64_t features);

// Ok if the checkpoint's model can run on shard.size ranks: heads divide, K/V heads divide or are
// divided, and every row-parallel matrix, in the format it is loaded in, can be cut there. The
// error says what does not divide, and the nearest degrees that would work.
absl::Status CheckShard(const Checkpoint& checkpoint, const WeightPlan& weights, int size);

}  // namespace treadle
