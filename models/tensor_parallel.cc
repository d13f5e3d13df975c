#include "models/tensor_parallel.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "base/status.h"
#include "kernels/formats/matrix_slice.h"
#include "models/architectures/architecture.h"

namespace treadle {
namespace {

// Where the row-parallel matrices of one kind can be cut: at multiples of `columns`, which `tensor`
// asks for.
struct Unit {
  int64_t columns = 1;
  const StoredTensor* tensor = nullptr;
  const WeightFormat* format = nullptr;
};

// The unit of matrices whose columns are `what`.
Unit UnitOf(Extent what, const Checkpoint& checkpoint, const WeightPlan& weights) {
  Unit unit;
  const Architecture& architecture = ArchitectureOf(checkpoint.config());
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const TensorName name = ParseTensorName(architecture, checkpoint.kind(), tensor.name);
    if (name.row == nullptr || tensor.shape.size() != 2) continue;
    const Extent columns =
        name.row->columns == Extent::kSharedInner ? Extent::kInner : name.row->columns;
    if (columns != what) continue;
    const QuantizeSpec* to = weights.For(tensor, checkpoint);
    const WeightFormat* format = to != nullptr ? to->format : tensor.format;
    const int64_t multiple = std::lcm(unit.columns, ColumnUnit(*format));
    if (multiple > unit.columns) unit = {multiple, &tensor, format};
  }
  return unit;
}

// The reason why the model cannot run on `size` ranks; empty: it can.
std::string Obstacle(const ModelConfig& config, const Unit& attention, const Unit& states,
                     const Unit& ffn, int size) {
  const auto cut = [](const Unit& unit) {
    return Str("'", unit.tensor->name, "' in ", unit.format->name, " can be cut at multiples of ",
               unit.columns, " columns only");
  };
  if (config.heads % size != 0) {
    return Str(config.heads, " attention heads cannot be divided by ", size);
  }
  for (const bool local : {false, true}) {
    const int64_t kv_heads = config.KvHeads(local);
    if (kv_heads % size != 0 && size % kv_heads != 0) {
      return Str(kv_heads, " K/V heads can neither be divided by ", size,
                 " nor be held by as many ranks each");
    }
    const int64_t dim = config.latent_dim > 0 ? config.value_dim : config.HeadDim(local);
    const int64_t columns = config.heads / size * dim;
    if (columns % attention.columns != 0) {
      return Str(cut(attention), ", and a rank would hold ", columns);
    }
  }
  if (config.HasStates() && config.StateUnits() % size != 0 && !SharesKeyHeads(config, size)) {
    return Str(config.StateUnits(),
               config.state_key_heads > 0 ? " key heads of states" : " channels of convolutions",
               " cannot be divided by ", size);
  }
  // Value heads that take turns are a rank's in ranges of as many as it has key heads.
  const int64_t range = config.tiled_states ? config.state_key_heads : config.state_heads;
  if (const int64_t values = range / size * config.state_value_dim; values % states.columns != 0) {
    return Str(cut(states), ", and a rank would hold ",
               range < config.state_heads ? "ranges of " : "", values);
  }
  int64_t inner = config.ffn_hidden;
  if (config.shared_hidden > 0) inner = std::min(inner, config.shared_hidden);
  if (config.dense_layers > 0 || config.mixed_every > 1)
    inner = std::min(inner, config.dense_hidden);
  if (inner / ffn.columns < size) {
    if (ffn.tensor == nullptr) return Str("there are only ", inner, " inner features");
    return Str(cut(ffn), ", and there are only ", inner);
  }
  if (config.vocab < size) return Str("there are only ", config.vocab, " tokens");
  return "";
}

}  // namespace

ShardRange PartOf(int64_t total, int64_t unit, Shard shard) {
  const int64_t units = total / unit;
  const auto begin = [&](int64_t rank) {
    return rank == shard.size ? total : units * rank / shard.size * unit;
  };
  return {begin(shard.rank), begin(shard.rank + 1)};
}

ShardRange QueryHeads(const ModelConfig& config, Shard shard) {
  return PartOf(config.heads, 1, shard);
}

ShardRange KvHeads(const ModelConfig& config, Shard shard) {
  if (shard.size <= config.kv_heads) return PartOf(config.kv_heads, 1, shard);
  const int64_t head = shard.rank * config.kv_heads / shard.size;
  return {head, head + 1};
}

ShardRange FfnFeatures(const Checkpoint& checkpoint, const WeightPlan& weights, Shard shard,
                       int64_t features) {
  const int64_t unit = UnitOf(Extent::kInner, checkpoint, weights).columns;
  const int64_t aligned = std::lcm(unit, int64_t{64});
  return PartOf(features, features / aligned >= shard.size ? aligned : unit, shard);
}

bool SharesKeyHeads(const ModelConfig& config, int size) {
  return config.HasStates() && ArchitectureOf(config).states == StateKind::kMamba2 &&
         size > config.state_key_heads && size % config.state_key_heads == 0 &&
         config.state_heads % size == 0;
}

ShardRange StateKeyHeads(const ModelConfig& config, Shard shard) {
  if (shard.size <= config.state_key_heads) return PartOf(config.state_key_heads, 1, shard);
  const int64_t head = shard.rank * config.state_key_heads / shard.size;
  return {head, head + 1};
}

StateLayout StateLayoutOf(const ModelConfig& config, Shard shard) {
  if (SharesKeyHeads(config, shard.size)) {
    ModelConfig own = config;
    own.state_key_heads = 1;
    own.state_heads = config.state_heads / shard.size;
    return StateOf(own, 1);
  }
  return StateOf(config, PartOf(config.StateUnits(), 1, shard).size());
}

absl::Status CheckShard(const Checkpoint& checkpoint, const WeightPlan& weights, int size) {
  const ModelConfig& config = checkpoint.config();
  if (size < 1) {
    return InvalidArgument(checkpoint.path(), ": tensor parallelism over ", size,
                           " ranks, expected 1 or more");
  }
  if (size == 1) return absl::OkStatus();
  const Unit attention =
      UnitOf(config.latent_dim > 0 ? Extent::kOwnValues : Extent::kQueries, checkpoint, weights);
  const Unit ffn = UnitOf(Extent::kInner, checkpoint, weights);
  const Unit states = UnitOf(Extent::kStateValues, checkpoint, weights);
  const auto obstacle = [&](int ranks) { return Obstacle(config, attention, states, ffn, ranks); };
  const auto works = [&](int ranks) { return obstacle(ranks).empty(); };
  if (works(size)) return absl::OkStatus();
  int below = size - 1;
  while (below > 1 && !works(below)) --below;  // one rank always works
  int above = size + 1;
  while (above <= config.heads && !works(above)) ++above;
  return InvalidArgument(checkpoint.path(), ": tensor parallelism over ", size,
                         " ranks: ", obstacle(size), "; ", below,
                         above <= config.heads ? Str(" or ", above) : "", " would work");
}

}  // namespace treadle
