#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "models/architectures/apertus.h"
#include "models/architectures/architecture.h"
#include "models/architectures/bloom.h"
#include "models/architectures/deepseek.h"
#include "models/architectures/exaone4.h"
#include "models/architectures/experts.h"
#include "models/architectures/falcon.h"
#include "models/architectures/gemma.h"
#include "models/architectures/gemma4.h"
#include "models/architectures/glm4.h"
#include "models/architectures/gpt2.h"
#include "models/architectures/gpt_neox.h"
#include "models/architectures/gpt_oss.h"
#include "models/architectures/granite.h"
#include "models/architectures/lfm2.h"
#include "models/architectures/llama.h"
#include "models/architectures/llama4.h"
#include "models/architectures/llama_like.h"
#include "models/architectures/nemotron.h"
#include "models/architectures/olmo.h"
#include "models/architectures/opt.h"
#include "models/architectures/phi3.h"
#include "models/architectures/qwen.h"
#include "models/architectures/qwen35.h"

namespace treadle {
namespace {

constexpr Architecture kArchitectures[] = {
    kLlama,     kGpt2,      kQwen2,      kQwen3,         kGptNeoX,
    kOpt,       kFalcon,    kPhi3,       kGemma3,        kBloom,
    kMixtral,   kQwen3Moe,  kGptOss,     kSmolLm3,       kGranite,
    kGranite4,  kOlmo2,     kSeedOss,    kGlm4,          kExaone4,
    kErnie45,   kHunyuan,   kMinistral3, kGemma4,        kApertus,
    kQwen35,    kQwen2Moe,  kQwen35Moe,  kQwen3Next,     kGlm4Moe,
    kMiniMaxM2, kLfm2,      kLfm2Moe,    kGraniteHybrid, kGraniteHybridMoe,
    kDeepseek2, kDeepseek3, kGemma4Moe,  kNemotronH,     kNemotronHMoe,
    kLlama4};

constexpr std::string_view kGgufLayers = "blk.";

std::string_view NameOf(const TensorRow& row, Container kind) {
  return kind == Container::kGguf ? row.gguf : row.hugging_face;
}

std::string_view LayersOf(const Architecture& architecture, Container kind) {
  return kind == Container::kGguf ? kGgufLayers : architecture.hugging_face_layers;
}

// Whether a tensor may have this name, and which expert's it then is.
bool Matches(std::string_view pattern, std::string_view name, std::string_view& expert) {
  const size_t star = pattern.find('*');
  if (star == pattern.npos) return pattern == name;
  const std::string_view before = pattern.substr(0, star), after = pattern.substr(star + 1);
  if (!name.starts_with(before) || !name.ends_with(after) || name.size() < pattern.size()) {
    return false;
  }
  const std::string_view number = name.substr(star, name.size() - before.size() - after.size());
  if (number.find('.') != number.npos) return false;
  expert = number;
  return true;
}

}  // namespace

std::span<const Architecture> Architectures() { return kArchitectures; }

const Architecture* FindArchitecture(std::string_view name) {
  const auto* found = std::ranges::find(kArchitectures, name, &Architecture::name);
  return found == std::end(kArchitectures) ? nullptr : found;
}

const Architecture* FindGgufArchitecture(std::string_view name, bool experts, bool sigmoid) {
  const Architecture* found = nullptr;
  for (const Architecture& row : kArchitectures) {
    if (row.GgufName() != name) continue;
    const auto differs = [&](const Architecture& from) {
      return 2 * (from.experts != experts) + (from.sigmoid_router != sigmoid);
    };
    if (found == nullptr || differs(row) < differs(*found)) found = &row;
  }
  return found;
}

const Architecture& ArchitectureOf(const ModelConfig& config) {
  const Architecture* const found = FindArchitecture(config.architecture);
  TREADLE_CHECK(found != nullptr);
  return *found;
}

std::string KnownArchitectures() {
  std::string names;
  for (const Architecture& row : kArchitectures) {
    names += Str(names.empty() ? "" : ", ", row.name);
  }
  return names;
}

int64_t SizeOf(Extent extent, const ModelConfig& config) {
  const int64_t queries = config.heads * config.head_dim, keys = config.kv_heads * config.head_dim;
  switch (extent) {
    case Extent::kNone:
    case Extent::kOne:
      return 1;
    case Extent::kLayerInput:
      return config.layer_embedding;
    case Extent::kLayerInputs:
      return config.layers * config.layer_embedding;
    case Extent::kHidden:
      return config.hidden;
    case Extent::kHeadDim:
      return config.head_dim;
    case Extent::kContext:
      return config.context + ArchitectureOf(config).position_offset;
    case Extent::kExperts:
      return config.experts;
    case Extent::kQueryLatent:
      return config.query_latent_dim;
    case Extent::kLatent:
      return config.latent_dim;
    case Extent::kUnrotated:
      return config.unrotated_dim;
    case Extent::kOwnQueries:
      return config.heads * config.QueryDim();
    case Extent::kLatentQueries:
      return config.heads * config.latent_dim;
    case Extent::kOwnValues:
      return config.heads * config.value_dim;
    case Extent::kTokens:
    case Extent::kVocab:
      return config.vocab;
    case Extent::kHeads:
      return config.heads;
    case Extent::kQueries:
    case Extent::kAllQueries:
      return queries;
    case Extent::kKeys:
    case Extent::kAllKeys:
      return keys;
    case Extent::kFused:
      return queries + 2 * keys;
    case Extent::kInner:
      return config.ffn_hidden;
    case Extent::kGateUp:
      return 2 * config.ffn_hidden;
    case Extent::kSharedInner:
      return config.shared_hidden;
    case Extent::kBetaDecay:
      return 2 * config.state_heads;
    case Extent::kGatedQueries:
      return (config.gated_attention ? 2 : 1) * queries;
    case Extent::kStateValueDim:
      return config.state_value_dim;
    case Extent::kTaps:
      return config.conv_taps;
    case Extent::kStateHeads:
      return config.state_heads;
    case Extent::kStateValues:
      return config.state_heads * config.state_value_dim;
    case Extent::kChannels:
      return 2 * config.state_key_heads * config.state_key_dim +
             config.state_heads * config.state_value_dim;
    case Extent::kStateProducts:
      return SizeOf(Extent::kChannels, config) + SizeOf(Extent::kStateValues, config) +
             config.state_heads;
  }
  return 0;
}

void CompleteConfig(ModelConfig& config) {
  const Architecture& architecture = ArchitectureOf(config);
  if (architecture.unrotated_every != nullptr && config.unrotated_every == 0) {
    config.unrotated_every = architecture.unrotated_every(config);
  }
  config.gated_attention = architecture.gated_attention;
  if (config.attention_chunk > 0) config.context = std::min(config.context, config.attention_chunk);
  if (architecture.states == StateKind::kConvolution) {
    config.state_heads = config.hidden;
    config.state_value_dim = 1;
  }
  if (architecture.latent) {
    config.kv_heads = 1;
    config.head_dim = config.latent_dim + config.rope_dim;
    config.query_scalar = config.QueryDim();
  }
  if (architecture.grouped_experts) {
    const bool in_range = config.shared_experts <= 1 << 12 && config.ffn_hidden <= 1 << 22;
    config.shared_hidden = in_range ? config.shared_experts * config.ffn_hidden : 0;
  }
  if (architecture.embedding_multiplied) {
    config.embedding_multiplier = std::sqrt(static_cast<double>(config.hidden));
  }
  if (architecture.local_unscaled && config.window > 0 && config.local_rope_base == 0) {
    config.local_rope_base = config.rope_base;
  }
}

std::optional<int64_t> PeriodOf(const std::vector<bool>& special) {
  const int64_t period = std::ranges::find(special, true) - special.begin() + 1;
  for (int64_t i = 0; i < std::ssize(special); ++i) {
    if (special[static_cast<size_t>(i)] != ((i + 1) % period == 0)) return std::nullopt;
  }
  return period;
}

std::vector<const TensorRow*> TensorsOf(const ModelConfig& config) {
  const Architecture& architecture = ArchitectureOf(config);
  std::vector<const TensorRow*> rows;
  for (const TensorRow& row : architecture.tensors) {
    if (row.present != nullptr && !row.present(config)) continue;
    const bool head_norm = row.part == Part::kQNorm || row.part == Part::kKNorm;
    if (row.part == Part::kHead ? !config.tied_head : !head_norm || architecture.qk_norm) {
      rows.push_back(&row);
    }
  }
  return rows;
}

TensorName ParseTensorName(const Architecture& architecture, Container kind, std::string_view name,
                           const ModelConfig* config) {
  TensorName parsed;
  for (const std::string_view suffix : {".weight", ".bias"}) {
    if (name.ends_with(suffix)) parsed.suffix = suffix;
  }
  if (kind == Container::kHuggingFace && name.starts_with(architecture.hugging_face_prefix)) {
    name.remove_prefix(architecture.hugging_face_prefix.size());
  }
  const std::string_view layers = LayersOf(architecture, kind);
  if (name.starts_with(layers)) {
    name.remove_prefix(layers.size());
    parsed.layer = name.substr(0, name.find('.'));
    if (parsed.layer.empty() || parsed.layer.size() == name.size()) return {};
    name.remove_prefix(parsed.layer.size() + 1);
  }
  for (const TensorRow& row : architecture.tensors) {
    if (config != nullptr && row.present != nullptr && !row.present(*config)) continue;
    if (InLayer(row.part) == parsed.layer.empty()) continue;
    if (row.bare ? NameOf(row, kind) == name
                 : !parsed.suffix.empty() &&
                       Matches(NameOf(row, kind),
                               name.substr(0, name.size() - parsed.suffix.size()), parsed.expert)) {
      parsed.row = &row;
    }
  }
  if (parsed.row != nullptr && parsed.row->bare) parsed.suffix = ".weight";
  return parsed.suffix.empty() ? TensorName() : parsed;
}

std::string SpellTensorName(const Architecture& architecture, Container kind,
                            const TensorName& name) {
  std::string own(NameOf(*name.row, kind));
  if (const size_t star = own.find('*'); star != own.npos) {
    // One tensor of all experts: its name has no number, and no dot before it.
    name.expert.empty() ? own.erase(star - 1, 2) : own.replace(star, 1, name.expert);
  }
  const std::string_view suffix = name.row->bare ? std::string_view() : name.suffix;
  if (!InLayer(name.row->part)) return Str(own, suffix);
  return Str(LayersOf(architecture, kind), name.layer, ".", own, suffix);
}

namespace {

// Queries, keys and values of one K/V head after those of another.
std::vector<int32_t> RowsByHeads(const ModelConfig& config) {
  std::vector<int32_t> order;
  const int64_t group = config.heads / config.kv_heads;
  const auto add = [&](int64_t head) {  // as the file counts them
    for (int64_t i = 0; i < config.head_dim; ++i) {
      order.push_back(static_cast<int32_t>(head * config.head_dim + i));
    }
  };
  for (int64_t head = 0; head < config.heads; ++head) add(head + head / group * 2);
  for (const int64_t what : {0, 1}) {
    for (int64_t head = 0; head < config.kv_heads; ++head) add((head + 1) * (group + 2) - 2 + what);
  }
  return order;
}

// Every head's query, then their gates: in files each head has its own behind its query.
std::vector<int32_t> GatesLast(const ModelConfig& config) {
  std::vector<int32_t> order;
  for (const int64_t what : {0, 1}) {
    for (int64_t head = 0; head < config.heads; ++head) {
      for (int64_t i = 0; i < config.head_dim; ++i) {
        order.push_back(static_cast<int32_t>((2 * head + what) * config.head_dim + i));
      }
    }
  }
  return order;
}

// Every value head's beta, then their decays: in files each key head has its own of both.
std::vector<int32_t> DecaysLast(const ModelConfig& config) {
  std::vector<int32_t> order;
  const int64_t group = config.state_heads / config.state_key_heads;
  for (const int64_t what : {0, 1}) {
    for (int64_t head = 0; head < config.state_heads; ++head) {
      order.push_back(static_cast<int32_t>((2 * (head / group) + what) * group + head % group));
    }
  }
  return order;
}

// The parts of a state's rows, which files have in another order: of Mamba 2 values, keys and
// queries, behind the gates and before the decays; of a convolution gates of what it reads, of what
// it gives, and what it reads.
std::vector<int32_t> StateRows(const TensorRow& row, const ModelConfig& config) {
  const int64_t keys = config.state_key_heads * config.state_key_dim;
  const int64_t values = config.state_heads * config.state_value_dim;
  std::vector<int32_t> order;
  const auto add = [&](int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) order.push_back(static_cast<int32_t>(first + i));
  };
  const bool all = row.rows == Extent::kStateProducts;
  if (ArchitectureOf(config).states == StateKind::kConvolution) {
    for (const int64_t part : {2, 1, 0}) add(part * values, all ? values : 0);
    return order;
  }
  const int64_t first = all ? values : 0;
  add(first + values + keys, keys);
  add(first + values, keys);
  add(first, values);
  if (!all) return order;
  add(0, values);
  add(2 * (values + keys), config.state_heads);
  return order;
}

}  // namespace

std::vector<int32_t> FileRowOrder(const TensorRow& row, const ModelConfig& config, Container kind) {
  std::vector<int32_t> order;
  const Architecture& architecture = ArchitectureOf(config);
  const bool folder = kind == Container::kHuggingFace;
  if (folder && row.part == Part::kQkv && architecture.hugging_face_qkv_by_heads) {
    return RowsByHeads(config);
  }
  if (row.rows == Extent::kGatedQueries && config.gated_attention) return GatesLast(config);
  if (row.rows == Extent::kBetaDecay) return DecaysLast(config);
  if (row.rows == Extent::kStateProducts ||
      (row.rows == Extent::kChannels && architecture.states == StateKind::kMamba2)) {
    return StateRows(row, config);
  }
  const bool pairs = folder ? architecture.hugging_face_pairs : architecture.gguf_pairs;
  if (!pairs || (row.part != Part::kQ && row.part != Part::kK)) return order;
  // Files have the rotated features of latent attention behind the others.
  const int64_t half = config.rope_dim / 2, rotated = config.rope_dim;
  const int64_t dim =
      architecture.latent && row.part == Part::kQ ? config.QueryDim() : config.head_dim;
  const int64_t before = architecture.latent ? dim - rotated : 0;
  for (int64_t first = 0; first < SizeOf(row.rows, config); first += dim) {
    for (int64_t i = 0; i < dim; ++i) {
      const int64_t pair = i < half ? 2 * i : 2 * (i - half) + 1;
      const int64_t from = i < rotated ? before + pair : i - (architecture.latent ? rotated : 0);
      order.push_back(static_cast<int32_t>(first + from));
    }
  }
  return order;
}

std::vector<int32_t> OrderBetween(std::span<const int32_t> first, std::span<const int32_t> second) {
  if (std::ranges::equal(first, second)) return {};
  std::vector<int32_t> order(std::max(first.size(), second.size()));
  for (size_t i = 0; i < order.size(); ++i) {
    order[second.empty() ? i : second[i]] = first.empty() ? static_cast<int32_t>(i) : first[i];
  }
  return order;
}

}  // namespace treadle
