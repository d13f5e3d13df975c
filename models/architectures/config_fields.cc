#include "models/architectures/config_fields.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

// Factors far from these would leave float's range, and angles would be NaN.
constexpr double kSmallest = 1e-6, kLargest = 1e12;
constexpr double kBelowOne = 0x1.fffffep-1;
constexpr double kMaxSize = 0x1p40;  // of what nothing is allocated for

constexpr bool (*kRotary)(const Architecture&) = [](const Architecture& a) { return a.rotary; };
constexpr bool (*kHeadDim)(const Architecture&) = [](const Architecture& a) {
  return a.rotary || a.one_block;
};
constexpr bool (*kChunked)(const Architecture&) = [](const Architecture& a) { return a.chunked; };
constexpr bool (*kBetween)(const Architecture&) = [](const Architecture& a) {
  return a.dense_between;
};
constexpr bool (*kLocal)(const Architecture&) = [](const Architecture& a) {
  return a.local_layers == Presence::kAlways;
};
constexpr bool (*kLocalBase)(const Architecture&) = [](const Architecture& a) {
  return a.local_base;
};
constexpr bool (*kLocalHeads)(const Architecture&) = [](const Architecture& a) {
  return a.local_heads;
};
constexpr bool (*kMultipliers)(const Architecture&) = [](const Architecture& a) {
  return a.multipliers;
};
constexpr bool (*kHeadStates)(const Architecture&) = [](const Architecture& a) {
  return a.states != StateKind::kNone && a.states != StateKind::kConvolution;
};
constexpr bool (*kExperts)(const Architecture&) = [](const Architecture& a) { return a.experts; };
constexpr bool (*kShared)(const Architecture&) = [](const Architecture& a) {
  return a.shared_expert;
};
constexpr bool (*kLatent)(const Architecture&) = [](const Architecture& a) { return a.latent; };
constexpr bool (*kGrouped)(const Architecture&) = [](const Architecture& a) {
  return a.grouped_experts;
};
constexpr bool (*kDense)(const Architecture&) = [](const Architecture& a) { return a.dense_first; };
constexpr bool (*kScaled)(const Architecture&) = [](const Architecture& a) {
  return a.sigmoid_router || a.grouped_experts;
};

// Families that say in config.json whether halves of a layer follow each other.
constexpr bool (*kSequential)(const Architecture&) = [](const Architecture& a) {
  const MemberPointer<ModelConfig> flag = &ModelConfig::parallel_residual;
  return std::ranges::find(a.config_json.own, flag, &JsonField::member) != a.config_json.own.end();
};

// Sizes are larger than any model's; small enough that products of two and a half of them fit 64
// bits.
using C = ModelConfig;
constexpr ConfigField<C> kModel[] = {
    {"architecture", &C::architecture},
    {"layers", &C::layers, "layers", 1, 1 << 12, "num_hidden_layers", "block_count"},
    {"hidden", &C::hidden, "hidden size", 1, 1 << 20, "hidden_size", "embedding_length"},
    {"heads", &C::heads, "heads", 1, 1 << 14, "num_attention_heads", "attention.head_count"},
    {"counts_kv_heads", &C::counts_kv_heads},
    {"keys_are_values", &C::keys_are_values},
    {"local_kv_heads", &C::local_kv_heads, "K/V heads of local layers", 1, 1 << 14, nullptr,
     nullptr, kLocalHeads},
    {"kv_heads", &C::kv_heads, "K/V heads", 1, 1 << 14, "num_key_value_heads",
     "attention.head_count_kv", nullptr, [](const C& c) { return c.heads; }},
    {"head_dim", &C::head_dim, "head size", 1, 1 << 12, "head_dim", "attention.key_length",
     kHeadDim, [](const C& c) { return c.hidden / c.heads; }},
    {"local_head_dim", &C::local_head_dim, "head size of local layers", 1, 1 << 12, nullptr,
     "attention.key_length_swa", kLocalHeads},
    {"shared_kv_layers", &C::shared_kv_layers, "layers that share K and V", 0, 1 << 12,
     "num_kv_shared_layers", "attention.shared_kv_layers", kLocalHeads},
    {"wide_shared_layers", &C::wide_shared_layers, nullptr, 0, 0, "use_double_wide_mlp", nullptr,
     kLocalHeads},
    {"layer_embedding", &C::layer_embedding, "features of a layer's embedding", 0, 1 << 16,
     "hidden_size_per_layer_input", "embedding_length_per_layer_input", kLocalHeads},
    {"rotated_pairs", &C::rotated_pairs, "rotated pairs of a head", 0, 1 << 12},
    {"logits_cap", &C::logits_cap, "cap of logits", 0, kLargest, "final_logit_softcapping",
     "final_logit_softcapping", kLocalHeads},
    {"ffn_hidden", &C::ffn_hidden, "feed-forward size", 1, 1 << 22, "intermediate_size",
     "feed_forward_length"},
    {"vocab", &C::vocab, "vocabulary", 1, 1 << 24, "vocab_size", "vocab_size"},
    {"context", &C::context, "context", 1, 1 << 24, "max_position_embeddings", "context_length"},
    {"norm_epsilon", &C::norm_epsilon, "norm epsilon", 0, kBelowOne},
    {"tied_head", &C::tied_head},
    {"qkv_bias", &C::qkv_bias},
    {"output_bias", &C::output_bias},
    {"head_norms", &C::head_norms},
    {"parallel_residual", &C::parallel_residual, nullptr, 0, 0, nullptr, "use_parallel_residual",
     kSequential},
    {"layer_norms", &C::layer_norms, "norms of a layer", 1, 2},
    {"rope_base", &C::rope_base, "rope base", kSmallest, kLargest, nullptr, "rope.freq_base",
     kRotary},
    {"rope_dim", &C::rope_dim, "rotated elements of a head", 2, 1 << 12, nullptr,
     "rope.dimension_count", kRotary,
     [](const C& c) { return ArchitectureOf(c).rotary ? c.head_dim : 0; }},
    {"latent_dim", &C::latent_dim, "size of latents", 1, 1 << 12, "kv_lora_rank",
     "attention.kv_lora_rank", kLatent},
    {"unrotated_dim", &C::unrotated_dim, "unrotated elements of a head", 1, 1 << 12,
     "qk_nope_head_dim", nullptr, kLatent},
    {"value_dim", &C::value_dim, "size of a head's values", 1, 1 << 12, "v_head_dim", nullptr,
     kLatent},
    {"query_latent_dim", &C::query_latent_dim, "size of queries' latents", 0, 1 << 16,
     "q_lora_rank", "attention.q_lora_rank", kLatent},
    {"rope_linear_factor", &C::rope_linear_factor, "rope scaling: linear factor", kSmallest,
     kLargest},
    {"window", &C::window, "sliding window", 1, 1 << 24, "sliding_window", nullptr, kLocal},
    {"global_layers", &C::global_layers, "global layers before others", 0, 1 << 24},
    {"global_every", &C::global_every, "layers per global one", 1, 1 << 24,
     "sliding_window_pattern", nullptr, kLocal,
     [](const C& c) { return ArchitectureOf(c).global_every; }},
    {"local_rope_base", &C::local_rope_base, "rope base of local layers", kSmallest, kLargest,
     "rope_local_base_freq", "rope.freq_base_swa", kLocalBase},
    {"unrotated_every", &C::unrotated_every, "layers per one that does not rotate", 0, 1 << 24},
    {"query_beta", &C::query_beta, "attn_scale", 0, kLargest, "attn_scale", nullptr, kChunked},
    {"query_floor", &C::query_floor, "floor_scale", 1, 1 << 24, "floor_scale", nullptr, kChunked},
    {"attention_chunk", &C::attention_chunk, "chunks of attention", 0, 1 << 24,
     "attention_chunk_size", nullptr, kChunked},
    {"experts", &C::experts, "experts", 1, 1 << 12, "num_local_experts", "expert_count", kExperts,
     nullptr, "num_experts"},
    {"experts_per_token", &C::experts_per_token, "experts per token", 1, 1 << 12,
     "num_experts_per_tok", "expert_used_count", kExperts},
    {"normalized_experts", &C::normalized_experts, nullptr, 0, 0, nullptr, "expert_weights_norm",
     kExperts, [](const C& c) { return int64_t{!ArchitectureOf(c).unnormalized_experts}; }},
    {"expert_scale", &C::expert_scale, "scale of experts' weights", kSmallest, kLargest,
     "routed_scaling_factor", "expert_weights_scale", kScaled},
    {"expert_groups", &C::expert_groups, "groups of experts", 1, 1 << 12, "n_group",
     "expert_group_count", kGrouped},
    {"used_expert_groups", &C::used_expert_groups, "groups of experts per token", 1, 1 << 12,
     "topk_group", "expert_group_used_count", kGrouped},
    {"shared_hidden", &C::shared_hidden, "feed-forward size of the shared expert", 0, 1 << 22,
     "shared_expert_intermediate_size", "expert_shared_feed_forward_length", kShared},
    {"shared_experts", &C::shared_experts, "shared experts", 0, 1 << 12, "n_shared_experts",
     "expert_shared_count", kGrouped},
    {"dense_layers", &C::dense_layers, "layers without experts", 0, 1 << 12,
     "first_k_dense_replace", "leading_dense_block_count", kDense},
    {"dense_hidden", &C::dense_hidden, "feed-forward size of layers without experts", 1, 1 << 22,
     "intermediate_size", nullptr, kDense},
    {"mixed_every", &C::mixed_every, "layers per one with experts", 0, 1 << 12,
     "interleave_moe_layer_step", "interleave_moe_layer_step", kBetween},
    {"ffn_layers", &C::ffn_layers, "a layer that is a feed-forward network", 0, 1 << 12},
    {"state_layers", &C::state_layers, "a layer that keeps a state", 0, 1 << 12},
    {"state_key_heads", &C::state_key_heads, "key heads of states", 1, 1 << 14,
     "linear_num_key_heads", "ssm.group_count", kHeadStates},
    {"state_heads", &C::state_heads, "value heads of states", 1, 1 << 20, "linear_num_value_heads",
     "ssm.time_step_rank", kHeadStates},
    {"state_key_dim", &C::state_key_dim, "key size of states", 1, 1 << 12, "linear_key_head_dim",
     "ssm.state_size", kHeadStates},
    {"state_value_dim", &C::state_value_dim, "value size of states", 1, 1 << 12,
     "linear_value_head_dim", nullptr, kHeadStates},
    {"conv_taps", &C::conv_taps, "positions of a convolution", 1, 16, "linear_conv_kernel_dim",
     "ssm.conv_kernel", kHeadStates},
    {"tiled_states", &C::tiled_states},
    {"gated_attention", &C::gated_attention},
    {"query_scalar", &C::query_scalar, "what divides scores", 0, kMaxSize},
    {"embedding_multiplier", &C::embedding_multiplier, "embedding multiplier", kSmallest, kLargest,
     "embedding_multiplier", "embedding_scale", kMultipliers},
    {"residual_multiplier", &C::residual_multiplier, "residual multiplier", kSmallest, kLargest,
     "residual_multiplier", "residual_scale", kMultipliers},
    {"attention_multiplier", &C::attention_multiplier, "attention multiplier", kSmallest, kLargest,
     "attention_multiplier", "attention.scale", kMultipliers},
    {"logits_divisor", &C::logits_divisor, "logits scaling", kSmallest, kLargest, "logits_scaling",
     "logit_scale", kMultipliers}};

constexpr ConfigField<RopeScaling> kRopeScaling[] = {
    {"factor", &RopeScaling::factor, "factor", kSmallest, kLargest, "factor"},
    {"low_freq_factor", &RopeScaling::low_freq_factor, "low_freq_factor", kSmallest, kLargest,
     "low_freq_factor"},
    {"high_freq_factor", &RopeScaling::high_freq_factor, "high_freq_factor", kSmallest, kLargest,
     "high_freq_factor"},
    {"original_context", &RopeScaling::original_context, "original context", 1, kMaxSize,
     "original_max_position_embeddings"}};

constexpr ConfigField<LongRope> kLongRope[] = {
    {"short_factors", &LongRope::short_factors, "a factor", kSmallest, kLargest, "short_factor"},
    {"long_factors", &LongRope::long_factors, "a factor", kSmallest, kLargest, "long_factor"},
    {"original_context", &LongRope::original_context, "original context", 1, kMaxSize, nullptr,
     "original_context_length"},
    {"attention_factor", &LongRope::attention_factor, "attention_factor", kSmallest, kLargest,
     "attention_factor", "attn_factor"}};

constexpr ConfigField<Yarn> kYarn[] = {
    {"factor", &Yarn::factor, "factor", 1, kLargest, "factor", "factor"},
    {"beta_fast", &Yarn::beta_fast, "beta_fast", kSmallest, kLargest, "beta_fast",
     "yarn_beta_fast"},
    {"beta_slow", &Yarn::beta_slow, "beta_slow", kSmallest, kLargest, "beta_slow",
     "yarn_beta_slow"},
    {"original_context", &Yarn::original_context, "original context", 1, kMaxSize,
     "original_max_position_embeddings", "original_context_length"},
    {"truncate", &Yarn::truncate, nullptr, 0, 0, "truncate", "yarn_truncate"},
    {"attention_factor", &Yarn::attention_factor, "attention_factor", kSmallest, kLargest,
     "attention_factor"},
    {"query_beta", &Yarn::query_beta, "llama_4_scaling_beta", 0, kLargest, "llama_4_scaling_beta"},
    {"score_scale", &Yarn::score_scale, "mscale_all_dim", 0, kLargest, "mscale_all_dim"}};

// Members of an aggregate: with how many values, of any types, it can be initialized.
struct AnyValue {
  template <typename T>
  operator T() const;
};
template <typename Struct, size_t... index>
consteval size_t CountMembers(std::index_sequence<index...>) {
  if constexpr (requires { Struct{(static_cast<void>(index), AnyValue{})...}; }) {
    return sizeof...(index);
  } else {
    return CountMembers<Struct>(std::make_index_sequence<sizeof...(index) - 1>());
  }
}
template <typename Struct>
constexpr size_t kMembers = CountMembers<Struct>(std::make_index_sequence<96>());
constexpr size_t kObjects = 3;  // of ModelConfig: those below
static_assert(std::size(kModel) + kObjects == kMembers<ModelConfig>);
static_assert(std::size(kRopeScaling) == kMembers<RopeScaling>);
static_assert(std::size(kLongRope) == kMembers<LongRope>);
static_assert(std::size(kYarn) == kMembers<Yarn>);

}  // namespace

template <>
std::span<const ConfigField<ModelConfig>> FieldsOf() {
  return kModel;
}
template <>
std::span<const ConfigField<RopeScaling>> FieldsOf() {
  return kRopeScaling;
}
template <>
std::span<const ConfigField<LongRope>> FieldsOf() {
  return kLongRope;
}
template <>
std::span<const ConfigField<Yarn>> FieldsOf() {
  return kYarn;
}

const ConfigField<ModelConfig>& FieldOf(const MemberPointer<ModelConfig>& member) {
  const auto* const found = std::ranges::find(kModel, member, &ConfigField<ModelConfig>::member);
  TREADLE_CHECK(found != std::end(kModel));
  return *found;
}

template <typename Struct>
absl::Status CheckRanges(const Struct& of, const Architecture& architecture,
                         std::string_view where) {
  for (const ConfigField<Struct>& field : FieldsOf<Struct>()) {
    const bool optional = !field.IsOf(architecture);
    const auto check = [&]<typename Number>(Number value) {
      const double number = static_cast<double>(value);
      const double least = optional && std::is_integral_v<Number> ? 0 : field.least;
      if ((number >= least && number <= field.largest) || (optional && number == 0)) {
        return absl::OkStatus();
      }
      return InvalidArgument(where, ": ", field.text, " is ", value, ", expected ",
                             static_cast<Number>(least), " to ",
                             static_cast<Number>(field.largest));
    };
    TREADLE_RETURN_IF_ERROR(VisitMember(field, of, [&]<typename Value>(const Value& value) {
      if constexpr (std::is_same_v<Value, std::vector<double>>) {
        absl::Status status;
        for (const double each : value) status.Update(check(each));
        return status;
      } else if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
        return check(value);
      } else {
        return absl::OkStatus();
      }
    }));
  }
  return absl::OkStatus();
}
template absl::Status CheckRanges(const ModelConfig&, const Architecture&, std::string_view);
template absl::Status CheckRanges(const RopeScaling&, const Architecture&, std::string_view);
template absl::Status CheckRanges(const LongRope&, const Architecture&, std::string_view);
template absl::Status CheckRanges(const Yarn&, const Architecture&, std::string_view);

JsonField JsonFieldOf(const Architecture& architecture, const ConfigField<ModelConfig>& field) {
  JsonField said = {field.IsOf(architecture) ? field.json : nullptr, field.member, field.otherwise,
                    nullptr, field.older_json};
  const std::span<const JsonField> own = architecture.config_json.own;
  const auto found = std::ranges::find(own, field.member, &JsonField::member);
  if (found == own.end()) return said;
  if (found->name != nullptr) return *found;
  said.name = nullptr;
  if (found->otherwise != nullptr) said.otherwise = found->otherwise;
  return said;
}

}  // namespace treadle
