// The hyper-parameters of a checkpoint, in one vocabulary for GGUF and Hugging Face. Their names in
// files, and their ranges: models/architectures/config_fields.h, which has a row for each member.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace treadle {

// Llama-3's frequency scaling (transformers' rope_type "llama3").
struct RopeScaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_context = 8192;
  bool operator==(const RopeScaling&) const = default;
};

// LongRoPE (Ding et al. 2024): by what the frequency of each pair is divided, where the context
// that is served is within the one of training, and where it is longer. [rope_dim / 2] each
struct LongRope {
  std::vector<double> short_factors, long_factors;
  int64_t original_context = 0;
  double attention_factor = 1;  // of rotated queries and of rotated keys
  bool operator==(const LongRope&) const = default;
};

// YaRN (Peng et al. 2023, section 3): frequencies of pairs that turn less than beta_slow times
// within the context of training are divided by the factor, those of more than beta_fast turns
// kept, those between blended. `truncate`: the blend begins and ends at whole pairs.
struct Yarn {
  double factor = 1;
  double beta_fast = 32;
  double beta_slow = 1;
  int64_t original_context = 0;
  bool truncate = true;
  double attention_factor = 1;  // of rotated queries and of rotated keys
  // Queries at position p are multiplied by 1 + query_beta ln(1 + floor(p / original_context)).
  double query_beta = 0;
  // Latent attention multiplies scores by the square of AttentionFactor(factor, this); by nothing
  // where it is 0.
  double score_scale = 0;

  bool operator==(const Yarn&) const = default;
  // The attention factor, where nothing says another.
  static double AttentionFactor(double factor, double scale = 1) {
    return factor > 1 ? 0.1 * scale * std::log(factor) + 1 : 1;
  }
};

template <typename Struct>
using MemberPointer =
    std::variant<int64_t Struct::*, double Struct::*, float Struct::*, bool Struct::*,
                 std::string Struct::*, std::vector<double> Struct::*>;

struct ModelConfig {
  std::string architecture;  // Architecture::name (models/architectures/architecture.h)
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t ffn_hidden = 0;
  int64_t vocab = 0;
  int64_t context = 0;
  float norm_epsilon = 1e-5f;
  bool tied_head = false;
  bool qkv_bias = false;     // of the products that make Q, K and V
  bool head_norms = true;    // of Q and K, in a family whose models may lack them
  bool output_bias = false;  // of the attention's output
  // For architectures that may do otherwise (GPT-NeoX, Falcon).
  bool parallel_residual = true;  // both halves of a layer read what the layer was given
  int64_t layer_norms = 2;        // 1: both halves read the same norm of it
  bool counts_kv_heads = true;    // config.json says how many K/V heads there are; else one

  // Rotary embedding, where the architecture has one.
  double rope_base = 10000.0;
  int64_t rope_dim = 0;  // elements of a head that rotate
  std::optional<RopeScaling> rope_scaling;
  double rope_linear_factor = 1.0;  // "linear" scaling: position / factor
  std::optional<LongRope> long_rope;
  std::optional<Yarn> yarn;

  // Latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): the cache holds of a position
  // rope_dim rotated features and latent_dim ones of a latent, as one K/V head of head_dim, of
  // which each head makes keys and values of its own. 0: none.
  int64_t latent_dim = 0;
  int64_t unrotated_dim = 0;     // of each head's query and key, besides rope_dim
  int64_t value_dim = 0;         // of each head's values
  int64_t query_latent_dim = 0;  // of what queries are made of; 0: the hidden state
  int64_t QueryDim() const { return unrotated_dim + rope_dim; }

  // Local layers see a window of positions; others are global: the first `global_layers`, and of
  // every `global_every` the last.
  int64_t window = 0;  // 0: no layer is local
  int64_t global_layers = 0;
  int64_t global_every = 0;  // 0: none besides the first
  bool Local(int64_t layer) const {
    return window > 0 && layer >= global_layers &&
           (global_every == 0 || (layer + 1) % global_every != 0);
  }
  double local_rope_base = 0;  // of local layers, which nothing scales; 0: they rotate as others do
  // The last of every so many layers has no rotary embedding; 0: all layers have it.
  int64_t unrotated_every = 0;
  // Queries at position p of layers without one are multiplied by 1 + query_beta ln(1 + floor((p +
  // 1) / query_floor)).
  double query_beta = 0;
  int64_t query_floor = 0;
  // Layers with one attend within chunks of so many positions; the context ends with the first
  // chunk. 0: there are none.
  int64_t attention_chunk = 0;
  bool Rotates(int64_t layer) const {
    return unrotated_every == 0 || (layer + 1) % unrotated_every != 0;
  }

  // Mixtures of experts: each row goes to some of the feed-forward networks of a layer, whose inner
  // features `ffn_hidden` counts. 0: a layer has one, for all rows.
  int64_t experts = 0;
  int64_t experts_per_token = 0;
  bool normalized_experts = true;  // weights are a softmax over those chosen; else over all
  double expert_scale = 1;         // of the weights of a row's experts (Routing::scale)
  int64_t expert_groups = 1;       // Routing::groups and used_groups
  int64_t used_expert_groups = 1;
  int64_t shared_hidden = 0;   // inner features of an expert for all rows; 0: there is none
  int64_t shared_experts = 0;  // so many of ffn_hidden each, side by side; 0: files say a size
  int64_t dense_layers = 0;    // the first ones, which have a network for all rows instead
  int64_t dense_hidden = 0;    // its inner features
  int64_t mixed_every = 0;     // of the others, the last of every so many has experts; 0: all
  bool Mixes(int64_t layer) const {
    return experts > 0 && layer >= dense_layers &&
           (mixed_every == 0 || (layer + 1) % mixed_every == 0);
  }

  // The numbers of the layers that keep a state of fixed size instead of K and V
  // (kernels/state_layout.h), ascending. Convolutions alone have a value head for each channel.
  std::vector<double> state_layers;
  int64_t state_key_heads = 0;
  int64_t state_heads = 0;  // of values
  int64_t state_key_dim = 0;
  int64_t state_value_dim = 0;
  int64_t conv_taps = 0;      // positions that the convolution sees
  bool tiled_states = false;  // StateLayout::tiled
  // The numbers of the layers that are a feed-forward network alone, ascending; the others then
  // attend or keep a state, and have no such network. Empty: layers are halves of both kinds.
  std::vector<double> ffn_layers;
  bool IsFfn(int64_t layer) const {
    return std::ranges::binary_search(ffn_layers, static_cast<double>(layer));
  }
  // The number of what ranks divide of a state: key heads, or channels of a convolution alone.
  int64_t StateUnits() const { return state_key_heads > 0 ? state_key_heads : state_heads; }
  bool HasStates() const { return !state_layers.empty(); }
  bool KeepsState(int64_t layer) const {
    return std::ranges::binary_search(state_layers, static_cast<double>(layer));
  }
  // Layers of [begin, end) whose pages are a ring: local ones and those that keep a state.
  bool HasRing(int64_t layer) const { return Local(layer) || KeepsState(layer); }
  int64_t RingLayers(int64_t begin, int64_t end) const {
    int64_t count = 0;
    for (int64_t layer = begin; layer < end; ++layer) count += HasRing(layer) ? 1 : 0;
    return count;
  }
  // Each head's query brings a gate of its size, whose sigmoid multiplies what the head attends to.
  bool gated_attention = false;
  // Gemma 4. Local layers have heads of another size, and other K/V heads, than the global ones,
  // which head_dim and kv_heads are of; 0: the same.
  int64_t local_head_dim = 0;
  int64_t local_kv_heads = 0;
  bool keys_are_values = false;  // of global layers: one product makes K and V
  // The last layers have no K and V: each reads those of the last layer of its kind that has some.
  int64_t shared_kv_layers = 0;
  bool wide_shared_layers = false;  // these have twice the inner features
  int64_t layer_embedding = 0;      // features of each layer's own embedding of a token; 0: none
  int64_t rotated_pairs = 0;        // of a head's rope_dim / 2, the first ones; 0: all
  double logits_cap = 0;            // logits are cap * tanh(logits / cap); 0: as they are

  int64_t HeadDim(bool local) const {
    return local && local_head_dim > 0 ? local_head_dim : head_dim;
  }
  int64_t KvHeads(bool local) const {
    return local && local_kv_heads > 0 ? local_kv_heads : kv_heads;
  }
  bool HasKv(int64_t layer) const { return layer < layers - shared_kv_layers && !IsFfn(layer); }
  // The layer whose K and V this one reads: itself, also where it reads none, or an earlier one;
  // -1: there is none.
  int64_t KvSource(int64_t layer) const {
    int64_t source = HasKv(layer) || IsFfn(layer) ? layer : layers - shared_kv_layers - 1;
    while (source >= 0 && Local(source) != Local(layer)) --source;
    return source;
  }
  // The last layer that a stage of a pipeline can begin with: a layer and its source are in one.
  int64_t LastStageBegin() const {
    int64_t last = layers - 1;
    for (int64_t layer = layers - shared_kv_layers; layer < layers; ++layer) {
      last = std::min(last, KvSource(layer));
    }
    return last;
  }
  // The layers of [begin, end) that have pages of their own: in a ring, if `local`, or whole ones.
  int64_t KvLayers(int64_t begin, int64_t end, bool local) const {
    int64_t count = 0;
    for (int64_t layer = begin; layer < end; ++layer)
      count += HasKv(layer) && HasRing(layer) == local;
    return count;
  }
  // One layer's sizes.
  ModelConfig OfLayer(int64_t layer) const {
    ModelConfig own = *this;
    own.head_dim = HeadDim(Local(layer));
    own.kv_heads = KvHeads(Local(layer));
    if (own.head_dim != head_dim) own.rope_dim = own.head_dim;
    if (wide_shared_layers && !HasKv(layer)) own.ffn_hidden *= 2;
    if (experts > 0 && !Mixes(layer)) own.ffn_hidden = dense_hidden;
    return own;
  }

  int64_t query_scalar = 0;  // whose root divides scores; 0: the size of a head

  // Factors of Granite's: of the embedding, of what each half of a layer adds, of scores (0: as
  // above), and what logits are divided by.
  double embedding_multiplier = 1;
  double residual_multiplier = 1;
  double attention_multiplier = 0;
  double logits_divisor = 1;

  bool operator==(const ModelConfig&) const = default;
};

}  // namespace treadle
