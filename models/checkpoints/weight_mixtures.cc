#include "models/checkpoints/weight_mixtures.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/status.h"
#include "base/sync.h"

namespace treadle {

struct Mixture {
  std::string_view name;
  std::string_view base;
  // V, or fused QKV; the contraction: in the first layers of so many ones (one of `first` parts of
  // all layers, or so many where `first` is negative), and behind them. Empty: base.
  struct Layers {
    int64_t first = 0;
    std::string_view in_first = {};
    std::string_view behind = {};
    bool more_bits = false;  // `in_first` where MoreBits says so, instead
  };
  Layers values;
  Layers contraction;
  std::string_view attention_output = {};
};

namespace {

constexpr Mixture kMixtures[] = {
    {.name = "q3_k_m",
     .base = "q3_k",
     .values = {.first = -2, .in_first = "q5_k", .behind = "q4_k"},
     .contraction = {.first = 16, .in_first = "q5_k", .behind = "q4_k"},
     .attention_output = "q4_k"},
    {.name = "q4_k_m",
     .base = "q4_k",
     .values = {.in_first = "q6_k", .more_bits = true},
     .contraction = {.in_first = "q6_k", .more_bits = true}},
    {.name = "q5_k_m",
     .base = "q5_k",
     .values = {.in_first = "q6_k", .more_bits = true},
     .contraction = {.in_first = "q6_k", .more_bits = true}},
};

// The first and the last eighth, and every third layer between.
bool MoreBits(int64_t layer, int64_t layers) {
  return layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
}

std::string_view FormatAt(const Mixture& mixture, const Mixture::Layers& rule, int64_t layer,
                          int64_t layers) {
  const int64_t first = rule.first < 0 ? -rule.first : rule.first > 0 ? layers / rule.first : 0;
  const bool larger = rule.more_bits ? MoreBits(layer, layers) : layer < first;
  const std::string_view format = larger ? rule.in_first : rule.behind;
  return format.empty() ? mixture.base : format;
}

}  // namespace

const Mixture* FindMixture(std::string_view name) {
  const auto* found = std::ranges::find(kMixtures, name, &Mixture::name);
  return found == std::end(kMixtures) ? nullptr : found;
}

std::string_view MixtureNames() { return "q3_k_m, q4_k_m, q5_k_m"; }

std::string_view FormatIn(const Mixture& mixture, const ModelConfig& config, Part part,
                          int64_t layer) {
  const bool eight_experts = config.experts == 8;
  switch (part) {
    case Part::kHead:
      return "q6_k";
    case Part::kEmbedding:
      return config.tied_head ? "q6_k" : mixture.base;
    case Part::kV:
    case Part::kQkv: {
      if (eight_experts) return "q8_0";
      const std::string_view format = FormatAt(mixture, mixture.values, layer, config.layers);
      // Models of 70 billion weights: V is an eighth of Q, and costs little.
      const bool large = config.layers == 80 && config.heads != config.kv_heads;
      return large && (format == "q3_k" || format == "q4_k") ? "q5_k" : format;
    }
    case Part::kK:
      return eight_experts ? "q8_0" : mixture.base;
    case Part::kAttentionOutput:
      if (eight_experts) return "q5_k";
      return mixture.attention_output.empty() ? mixture.base : mixture.attention_output;
    case Part::kDown:
    case Part::kExpertDown:
    case Part::kSharedDown:
      return FormatAt(mixture, mixture.contraction, layer, config.layers);
    default:
      return mixture.base;
  }
}

const QuantizeSpec& SpecNamed(std::string_view format) {
  static Mutex mutex;
  static auto& specs = *new std::map<std::string, QuantizeSpec, std::less<>>();
  const MutexLock lock(mutex);
  auto found = specs.find(format);
  if (found == specs.end()) {
    auto spec = ParseQuantizeSpec(format);
    TREADLE_CHECK(spec.ok());
    found = specs.emplace(format, *std::move(spec)).first;
  }
  return found->second;
}

const QuantizeSpec& Fitting(const QuantizeSpec& spec, int64_t k) {
  constexpr std::pair<std::string_view, std::string_view> kSmaller[] = {
      {"q3_k", "q4_0"}, {"q4_k", "q5_0"}, {"q5_k", "q5_1"}, {"q6_k", "q8_0"}, {"iq4_xs", "iq4_nl"}};
  for (const auto& [from, to] : kSmaller) {
    if (spec.format->name == from && k % spec.format->block != 0) return SpecNamed(to);
  }
  return spec;
}

}  // namespace treadle
