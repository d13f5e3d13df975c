#include "models/checkpoints/gguf/gguf_layers.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "base/status.h"

namespace treadle {
namespace {

// Layers of one block each are listed by their K/V heads and inner features: where there are
// neither they keep a state.
absl::Status ReadBlocks(const GgufFile& file, const std::string& prefix, ModelConfig& config) {
  const std::string names[] = {prefix + kGgufKvHeads, prefix + kGgufInner};
  int64_t* const sizes[] = {&config.kv_heads, &config.ffn_hidden};
  const GgufValue* const lists[] = {file.Find(names[0]), file.Find(names[1])};
  for (const int what : {0, 1}) {
    if (lists[what] == nullptr || std::ssize(lists[what]->numbers) < config.layers) {
      return Unimplemented(file.path(), ": metadata ", Quoted(names[what]), " lists ",
                           lists[what] == nullptr ? 0 : lists[what]->numbers.size(),
                           " layers, expected ", config.layers);
    }
    *sizes[what] = 0;
  }
  for (int64_t i = 0; i < config.layers; ++i) {
    double own[2] = {};
    for (const int what : {0, 1}) {
      own[what] = lists[what]->numbers[static_cast<size_t>(i)];
      if (own[what] == 0) continue;
      const bool whole = own[what] >= 1 && own[what] <= 0x1p40;
      if (whole && *sizes[what] == 0) *sizes[what] = static_cast<int64_t>(own[what]);
      if (whole && own[what] == static_cast<double>(*sizes[what]) && own[0] * own[1] == 0) continue;
      return Unimplemented(file.path(), ": metadata ", Quoted(names[what]), " says ", own[what],
                           " of layer ", i, ", expected as of other layers, or 0");
    }
    if (own[1] > 0) config.ffn_layers.push_back(static_cast<double>(i));
    if (own[0] == 0 && own[1] == 0) config.state_layers.push_back(static_cast<double>(i));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadGgufWindow(const GgufFile& file, const std::string& prefix,
                            const Architecture& architecture, ModelConfig& config) {
  // 0: none, as llama.cpp writes of Phi-4.
  TREADLE_ASSIGN_OR_RETURN(config.window, file.Integer(prefix + "attention.sliding_window", 0));
  if (config.window == 0 || architecture.local_layers == Presence::kNever) return absl::OkStatus();
  const std::string key = prefix + "attention.sliding_window_pattern";
  const GgufValue* const pattern = file.Find(key);
  if (pattern == nullptr || pattern->numbers.size() < 2) {
    TREADLE_ASSIGN_OR_RETURN(config.global_every, file.Integer(key, architecture.global_every));
    return absl::OkStatus();
  }
  std::vector<bool> global;
  for (const double local : pattern->numbers) global.push_back(local == 0);
  const std::optional<int64_t> period = PeriodOf(global);
  if (!period || std::ssize(global) != config.layers) {
    return Unimplemented(file.path(), ": metadata ", Quoted(key), " lists ", global.size(),
                         " layers, expected ", config.layers,
                         " with global ones at regular distances");
  }
  config.global_every = *period;
  return absl::OkStatus();
}

absl::Status ReadGgufStates(const GgufFile& file, const std::string& prefix,
                            const Architecture& architecture, ModelConfig& config) {
  const StateKind kind = architecture.states;
  if (kind == StateKind::kConvolution) {
    TREADLE_ASSIGN_OR_RETURN(config.conv_taps, file.Integer(prefix + "shortconv.l_cache"));
  } else {
    TREADLE_ASSIGN_OR_RETURN(const int64_t inner, file.Integer(prefix + "ssm.inner_size"));
    config.state_value_dim = inner / std::max<int64_t>(1, config.state_heads);
  }
  config.tiled_states =
      architecture.gguf_tiled_states && config.state_heads != config.state_key_heads;
  if (architecture.one_block) return ReadBlocks(file, prefix, config);
  const std::string listed = prefix + "attention.recurrent_layers", heads = prefix + kGgufKvHeads;
  const GgufValue* const value = file.Find(listed);
  const GgufValue* const kv_heads = file.Find(heads);
  const bool by_heads = value == nullptr && kv_heads != nullptr && kv_heads->numbers.size() > 1;
  const GgufValue* const list = by_heads ? kv_heads : value;
  if (list == nullptr) {
    const bool delta = kind == StateKind::kDeltaRule;
    TREADLE_ASSIGN_OR_RETURN(const int64_t every,
                             file.Integer(prefix + "full_attention_interval",
                                          delta ? std::optional(kAttentionEvery) : std::nullopt));
    for (int64_t i = 0; i < std::min<int64_t>(config.layers, 1 << 12); ++i) {
      if (every < 1 || (i + 1) % every != 0) config.state_layers.push_back(static_cast<double>(i));
    }
    return absl::OkStatus();
  }
  bool alike = std::ssize(list->numbers) >= config.layers;
  for (int64_t i = 0; alike && i < config.layers; ++i) {
    const double number = list->numbers[static_cast<size_t>(i)];
    if ((number == 0) == by_heads) {
      config.state_layers.push_back(static_cast<double>(i));
    } else if (by_heads) {
      const bool first = std::ssize(config.state_layers) == i;
      alike = number >= 1 && number <= 0x1p40 && (first || number == config.kv_heads);
      if (alike) config.kv_heads = static_cast<int64_t>(number);
    }
  }
  if (alike) return absl::OkStatus();
  return Unimplemented(file.path(), ": metadata ", Quoted(by_heads ? heads : listed), " lists ",
                       list->numbers.size(), " layers, expected ", config.layers,
                       by_heads ? ", with as many K/V heads wherever there are some" : "");
}

absl::Status ReadGgufLayerSizes(const GgufFile& file, const std::string& prefix,
                                const std::function<bool(int64_t layer)>& has_values,
                                ModelConfig& config) {
  std::vector<bool> global;
  for (int64_t i = 0; i < config.layers; ++i) global.push_back(!config.Local(i));
  const int64_t first_global = std::ranges::find(global, true) - global.begin();
  const int64_t first_local = std::ranges::find(global, false) - global.begin();
  const auto at = [&](const std::string& key, int64_t layer) {
    const GgufValue* const value = file.Find(key);
    if (value == nullptr || value->numbers.empty()) return config.heads;  // as all families
    const size_t last = value->numbers.size() - 1;
    const double number = value->numbers[std::min(static_cast<size_t>(layer), last)];
    return number >= 1 && number <= 0x1p40 ? static_cast<int64_t>(number) : int64_t{0};
  };
  const std::string heads = prefix + kGgufKvHeads, inner = prefix + kGgufInner;
  config.kv_heads = at(heads, first_global);
  config.local_kv_heads = at(heads, first_local);
  int64_t ModelConfig::*const dense =
      config.experts > 0 ? &ModelConfig::shared_hidden : &ModelConfig::ffn_hidden;
  config.*dense = at(inner, 0);
  config.wide_shared_layers =
      config.shared_kv_layers > 0 && at(inner, config.layers - 1) != config.*dense;
  config.keys_are_values = !has_values(first_global);
  for (int64_t i = 0; i < config.layers; ++i) {
    const ModelConfig own = config.OfLayer(i);
    for (const auto& [key, size] : {std::pair(heads, own.kv_heads), std::pair(inner, own.*dense)}) {
      if (size > 0 && at(key, i) == size) continue;
      return Unimplemented(file.path(), ": metadata ", Quoted(key), " says ", at(key, i),
                           " of layer ", i, ", expected ", size, " as of other layers of its kind");
    }
  }
  for (const char* const key : {"attention.value_length_swa", "rope.dimension_count_swa"}) {
    TREADLE_ASSIGN_OR_RETURN(const int64_t size, file.Integer(prefix + key, config.local_head_dim));
    if (size == config.local_head_dim) continue;
    return Unimplemented(file.path(), ": ", prefix, key, " is ", size,
                         ", expected attention.key_length_swa, ", config.local_head_dim);
  }
  return absl::OkStatus();
}

}  // namespace treadle
