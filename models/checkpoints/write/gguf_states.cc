#include "models/checkpoints/write/gguf_states.h"

#include <array>
#include <memory>
#include <utility>

namespace treadle {
namespace {

// The sections of positions that loaders of Qwen 3.5 want to know: the authors' own. Tokens of text
// have the same position in each.
constexpr std::array<int32_t, 4> kSections = {11, 11, 10, 0};

// Element i of the file is element [i] of the folder: the first value head of each key head, then
// the second of each, and so on. Empty: `extent` counts nothing of value heads.
std::vector<int32_t> TiledOrder(Extent extent, const ModelConfig& config) {
  const bool channels = extent == Extent::kChannels, values = extent == Extent::kStateValues;
  if (!channels && !values && extent != Extent::kStateHeads) return {};
  const int64_t each = channels || values ? config.state_value_dim : 1;
  const int64_t before = channels ? 2 * config.state_key_heads * config.state_key_dim : 0;
  const int64_t group = config.state_heads / config.state_key_heads;
  std::vector<int32_t> order;
  for (int64_t i = 0; i < before; ++i) order.push_back(static_cast<int32_t>(i));
  for (int64_t in_group = 0; in_group < group; ++in_group) {
    for (int64_t key_head = 0; key_head < config.state_key_heads; ++key_head) {
      const int64_t first = before + (key_head * group + in_group) * each;
      for (int64_t i = 0; i < each; ++i) order.push_back(static_cast<int32_t>(first + i));
    }
  }
  return order;
}

}  // namespace

bool ListsKvHeads(const Architecture& architecture) {
  return architecture.states == StateKind::kMamba2 ||
         architecture.states == StateKind::kConvolution;
}

void DescribeStates(const ModelConfig& config, const Architecture& architecture,
                    const std::string& prefix, GgufMetadataWriter& metadata) {
  if (architecture.states == StateKind::kConvolution) {
    metadata.Add(prefix + "shortconv.l_cache", static_cast<uint32_t>(config.conv_taps));
  } else {
    metadata.Add(prefix + "ssm.inner_size",
                 static_cast<uint32_t>(SizeOf(Extent::kStateValues, config)));
  }
  const auto count = static_cast<size_t>(config.layers);
  const auto keeps = std::make_unique<bool[]>(count);
  std::vector<int32_t> kv_heads, inner;
  for (size_t i = 0; i < count; ++i) {
    const bool network = config.IsFfn(static_cast<int64_t>(i));
    keeps[i] = config.KeepsState(static_cast<int64_t>(i));
    kv_heads.push_back(keeps[i] || network ? 0 : static_cast<int32_t>(config.kv_heads));
    inner.push_back(network ? static_cast<int32_t>(config.ffn_hidden) : 0);
  }
  if (architecture.one_block) {
    metadata.Add(prefix + "feed_forward_length", inner);
    metadata.Add(prefix + "attention.value_length", static_cast<uint32_t>(config.head_dim));
  }
  if (ListsKvHeads(architecture)) {
    metadata.Add(prefix + "attention.head_count_kv", kv_heads);
  } else {
    metadata.Add(prefix + "attention.recurrent_layers", std::span<const bool>(keeps.get(), count));
  }
  if (architecture.gguf_tiled_states) {
    metadata.Add(prefix + "rope.dimension_sections", std::span<const int32_t>(kSections));
  }
  if (architecture.may_not_rotate) {
    metadata.Add(prefix + "rope.scaling.finetuned", config.unrotated_every != 1);
  }
}

void ArrangeState(const TensorRow& row, const ModelConfig& config, TensorTarget& target) {
  target.to_rates = row.part == Part::kDecayRate;
  if (!ArchitectureOf(config).gguf_tiled_states || config.state_heads == config.state_key_heads) {
    return;
  }
  if (std::vector<int32_t> rows = TiledOrder(row.rows, config); !rows.empty()) {
    target.row_order = std::move(rows);
  }
  target.column_order = TiledOrder(row.columns, config);
}

std::vector<int64_t> GgufStateShape(const TensorRow& row, const ModelConfig& config,
                                    std::vector<int64_t> shape) {
  const bool of_heads = row.part == Part::kDecayRate || row.part == Part::kStateSkip;
  if (ArchitectureOf(config).states != StateKind::kMamba2 || shape.size() != 1) return shape;
  if (of_heads) return {shape[0], 1};
  if (row.part != Part::kStateNorm) return shape;
  return {config.state_key_heads, shape[0] / config.state_key_heads};
}

}  // namespace treadle
