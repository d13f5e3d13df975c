// An architecture as data: all that there is to know of one. Readers and writers of checkpoints,
// loading, tensor parallelism and random models ask it; nothing outside of this folder compares an
// architecture's name. To add one: a description in a header of its own, and its row in table.cc.
//
// Thread safety: constants and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "kernels/state_layout.h"
#include "models/architectures/model_config.h"

namespace treadle {

struct LayerPass;     // models/decoder.h
struct LayerWeights;  // likewise

// The container of a model: a .gguf file, or a Hugging Face folder.
enum class Container { kGguf, kHuggingFace };

// The role of a tensor. From kAttentionNorm on every layer has one of its own.
enum class Part {
  kEmbedding,
  kPositions,
  kEmbeddingNorm,
  kLayerEmbedding,        // of all layers, side by side (ModelConfig::layer_embedding)
  kLayerInputProjection,  // what the embedding adds to these
  kLayerInputNorm,        // of that, for each layer
  kOutputNorm,
  kHead,
  kAttentionNorm,
  kQkv,
  kQueryDown,  // of latent attention: what queries are made of, and its norm
  kQueryDownNorm,
  kQ,
  kK,  // of latent attention: the rotated features, then the latent
  kLatentNorm,
  kKeyUp,    // of each head, what makes of its query one of latents
  kValueUp,  // of each head, what makes values of latents
  kV,
  kQNorm,
  kKNorm,
  kSinks,  // a logit of each head (KvView::sinks)
  kAttentionOutput,
  kStateInput,  // of layers that keep a state: queries, keys and values, before a convolution
  kStateGate,
  kStateBeta,
  kStateDecay,
  kConvolution,  // [channels, taps]
  kDecayRate,    // of each value head; logarithms in folders, less than 0 in GGUF
  kDecayBias,
  kStateSkip,  // of each value head: how much of its value is added to what it gives
  kStateNorm,
  kStateOutput,
  kPostAttentionNorm,  // of what is added to the residual stream
  kFfnNorm,
  kGate,
  kUp,
  kDown,
  kGateUp,
  kRouter,       // whose logits say which experts a row goes to
  kRouterBias,   // Routing::bias
  kRouterNorm,   // of what the router reads, where that is not what experts read
  kExpertNorm,   // of what experts read, beside a network that reads kFfnNorm's
  kExpertScale,  // Routing::expert_scales
  kExpertGate,
  kExpertUp,
  kExpertDown,
  kSharedRouter,  // whose logit's sigmoid multiplies the expert for all rows
  kSharedGate,    // of that expert
  kSharedUp,
  kSharedDown,
  kPostDenseNorm,    // of what a network beside experts makes
  kPostExpertNorm,   // of what these make
  kPostFfnNorm,      // of what is added
  kInputGate,        // of the layer's own embedding
  kInputProjection,  // of what the gate lets pass
  kPostInputNorm,    // of what that adds
  kXieluPositive,    // numbers of the layer's activation (XieluScales): its inverse softplus
  kXieluNegative,    // likewise of what the slope is added to
  kXieluSlope,
  kXieluLargest,
  kLayerScale  // a factor of the residual stream behind the layer
};
constexpr bool InLayer(Part part) { return part >= Part::kAttentionNorm; }
// Only layers that keep a state have it, or only those that attend.
constexpr bool InState(Part part) {
  return part >= Part::kStateInput && part <= Part::kStateOutput;
}
constexpr bool InAttention(Part part) {
  return part >= Part::kQkv && part <= Part::kAttentionOutput;
}
// A number of a layer's activation.
constexpr bool InXielu(Part part) {
  return part >= Part::kXieluPositive && part <= Part::kXieluLargest;
}
// A layer has such a matrix for each expert.
constexpr bool InExperts(Part part) {
  return part >= Part::kExpertGate && part <= Part::kExpertDown;
}

// Whether answers bear its activations in 8 bits (ComputeMode::kMixed), by the divergence that each
// part alone brings (docs/quantization.md).
constexpr bool BearsCoarse(Part part) {
  constexpr Part kParts[] = {Part::kQ,          Part::kAttentionOutput, Part::kGate,
                             Part::kDown,       Part::kExpertGate,      Part::kExpertDown,
                             Part::kSharedGate, Part::kSharedDown};
  return std::ranges::find(kParts, part) != std::end(kParts);
}

// The kind of a tensor's rows or columns. Ranks divide some of these among them: a matrix with
// such rows is column-parallel, one with such columns row-parallel (tensor_parallel.h).
enum class Extent {
  kNone,  // the columns of a vector
  kHidden,
  kHeadDim,
  kStateValueDim,
  kTaps,
  kContext,
  kExperts,
  kOne,
  kQueryLatent,  // ModelConfig's query_latent_dim, latent_dim and unrotated_dim
  kLatent,
  kUnrotated,
  kTokens,       // the vocabulary, on every rank
  kLayerInput,   // features of a layer's own embedding
  kLayerInputs,  // of all layers' together
  kAllQueries,   // of all ranks, as one norm wants them; the rows of kQueries
  kAllKeys,      // likewise
  kVocab,        // from here on, divided among ranks
  kHeads,
  kQueries,
  kGatedQueries,   // of each head its query, then its gate
  kOwnQueries,     // of latent attention: of each head the rotated features, then the others
  kLatentQueries,  // a latent's features for each head
  kOwnValues,      // each head's values
  kKeys,           // or values
  kFused,          // queries, keys and values
  kStateHeads,     // value heads of a state
  kBetaDecay,      // of each key head a beta of each of its value heads, then their decays
  kStateValues,    // their features
  kChannels,       // queries, keys and values of a state
  kStateProducts,  // kChannels, kStateValues and kStateHeads: all that a layer which keeps a
                   // state makes of its input, by one matrix
  kInner,          // features of the feed-forward network, or of an expert
  kSharedInner,    // features of the expert for all rows
  kGateUp          // the gate's, then as many of what it gates
};
int64_t SizeOf(Extent extent, const ModelConfig& config);

// Whether something is there: never, always, or as the file says.
enum class Presence { kNever, kAlways, kAsStored };

// A matrix, or a vector.
struct TensorRow {
  Part part;
  // Names without ".weight", ".bias", and what says the layer; '*' is an expert's number. (GGUF
  // keeps all experts' matrices in one tensor: gguf_file.h.)
  std::string_view gguf;
  std::string_view hugging_face;
  Extent rows;
  Extent columns = Extent::kNone;
  // Null: has no bias.
  bool (*bias)(const ModelConfig&) = nullptr;
  // Null: every model has it, in layers of its kind. A model has one of the rows with the same name
  // in a file.
  bool (*present)(const ModelConfig&) = nullptr;
  bool (*in_layer)(const ModelConfig&, int64_t layer) = nullptr;  // null: of all layers of its kind
  bool bare = false;  // its names are whole: ".weight" is not in them
};

// How folders keep the experts of a layer: apart, or all in one tensor (fused_experts.h), with the
// rows of an expert's gate and up by turns, or first those of the gate.
// The last: matrices are [in, out], with the gate's columns first.
enum class FusedExperts { kNever, kByTurns, kByHalves, kByHalvesTransposed };

enum class NormKind { kRms, kLayer };  // the second has biases

// The use that layers make of a state that they keep.
enum class StateKind {
  kNone,         // there are no such layers
  kDeltaRule,    // Backend::GatedDelta behind a convolution
  kMamba2,       // likewise, in the form of Mamba 2
  kConvolution,  // a convolution between two gates, without more of a state
};

// A size or a flag in config.json, where a family's files differ from the table of config_fields.h.
struct JsonField {
  const char* name;  // null: they do not say it
  MemberPointer<ModelConfig> member;
  int64_t (*otherwise)(const ModelConfig&) = nullptr;  // where it is missing; null: an error
  bool ModelConfig::*counts = nullptr;  // without this flag the field says nothing; null: it does
  const char* also = nullptr;           // another name of the field, which is written too
};
// A field that is missing, null, or `json`: nothing else is computed.
struct FixedField {
  const char* name;
  const char* json;
  bool required = false;  // it has to be there
};

// config.json. Errors of its reader (hf_config.cc) name the field.
struct ConfigJson {
  std::span<const std::string_view> classes;  // "architectures" is one of them; written: the first
  std::span<const JsonField> own = {};        // that this family's files say in another way
  std::span<const FixedField> fixed = {};
  const char* epsilon = "rms_norm_eps";  // null: there is no such field
  double default_epsilon = 1e-6;
  double default_rope_base = 10000;
  bool tied_head = false;  // where "tie_word_embeddings" is missing
  // A field without which "sliding_window" means nothing, and "max_window_layers" with it; null: it
  // is of all layers.
  const char* window_switch = nullptr;
  std::string_view window_model_type = {};   // of those with a window; their class is the last
  std::string_view model_type = {};          // if it is not the architecture's name
  std::span<const JsonField> repeated = {};  // fields that are missing or say a size again
  const char* rope_base = "rope_theta";
  const char* rotary_share = nullptr;  // how much of a head rotates; null: all
  double default_rotary_share = 1;
};

struct Architecture {
  std::string_view name;  // ModelConfig::architecture
  // The forward pass of one layer: reads like the paper.
  absl::Status (*layer)(const LayerPass& pass, const LayerWeights& weights);
  std::span<const TensorRow> tensors;  // the embedding first; those that a model may lack included
  NormKind norm = NormKind::kRms;
  bool rotary = true;  // positions rotate Q and K; else a table embeds them, if there is one
  bool alibi = false;  // or neither: scores fall with the distance (KvView::slopes)
  Presence qkv_bias = Presence::kNever;
  Presence output_bias = Presence::kNever;  // of the attention's output
  bool qk_norm = false;                     // every head's queries and keys are normalized
  bool norms_after_rotation = false;        // of these
  bool embedding_scaled = false;            // by the root of the hidden size
  bool embedding_multiplied = false;        // likewise, in a residual stream that is kept as it is
  bool multipliers = false;                 // ModelConfig::embedding_multiplier and the others
  // Local layers in turn with global ones: in every model, or in those that have a window.
  Presence local_layers = Presence::kNever;
  int64_t global_every = 0;        // ModelConfig's, where a file leaves it out
  bool local_base = false;         // local layers rotate by a base of their own
  bool local_heads = false;        // and have heads of their own (ModelConfig::local_head_dim)
  bool values_normalized = false;  // each head's, without a gain
  // Likewise queries and keys, in layers that rotate (ModelConfig::head_norms).
  bool unit_head_norms = false;
  bool local_unscaled = false;  // or by the base of all, which nothing scales for them
  // ModelConfig::unrotated_every, where a file leaves it out; null: all layers rotate.
  int64_t (*unrotated_every)(const ModelConfig&) = nullptr;
  // Layers that rotate attend within chunks, and queries of the others grow
  // (ModelConfig::attention_chunk and query_beta).
  bool chunked = false;
  // All layers rotate or none does, as files say: "position_embedding_type" in config.json.
  bool may_not_rotate = false;
  bool xielu = false;  // nothing gates: the activation is an xIELU
  bool geglu = false;  // what gates is a GeLU; else a SiLU
  // ModelConfig::query_scalar, which no key of GGUF says; null: the size of a head.
  int64_t (*gguf_query_scalar)(const ModelConfig&) = nullptr;
  bool grouped = true;  // heads of any size may share K and V; else all are one hidden size's
  StateKind states = StateKind::kNone;  // of some layers (ModelConfig::state_layers)
  bool gated_attention = false;         // ModelConfig's
  bool one_block = false;               // layers are one block each (ModelConfig::ffn_layers)
  ConfigJson config_json;
  std::string_view hugging_face_layers = "model.layers.";  // before a layer's number
  std::string_view hugging_face_prefix = {};               // before all but the head, in some files
  bool hugging_face_transposed = false;  // folders keep layers' matrices [in, out]
  float hugging_face_gain = 0;           // what a norm's gain is larger by than in folders
  // GGUF's rows of Q and K are ordered for rotation of adjacent pairs: (2i, 2i + 1) of each head.
  // Inside, and in Hugging Face files, pairs are (i, i + rope_dim / 2).
  bool gguf_pairs = false;
  bool hugging_face_pairs = false;  // folders too
  // Folders order the rows of Q, K and V in one matrix by K/V heads: the queries that read the
  // first, it, its values; the second's; and so on. Inside, and in GGUF, all queries come first.
  bool hugging_face_qkv_by_heads = false;
  int64_t position_offset = 0;      // the table of positions begins with so many that no token has
  bool gguf_layer_epsilon = false;  // GGUF calls the epsilon of its norms that of layer norms
  std::string_view gguf_second_norm = {};  // a model that lacks it has one norm a layer
  bool gguf_elsewhere = true;              // llama.cpp reads GGUF files of it
  bool experts = false;                    // in every layer, or but for the first ones:
  bool dense_first = false;                // ModelConfig::dense_layers
  bool dense_between = false;              // ModelConfig::mixed_every
  // A row goes to one expert, which reads it multiplied by the sigmoid of the expert's logit.
  bool gated_rows = false;
  bool shared_expert = false;         // beside them (ModelConfig::shared_hidden)
  bool sigmoid_router = false;        // Routing::sigmoid
  bool grouped_experts = false;       // Routing::groups; and ModelConfig::shared_experts
  bool latent = false;                // latent attention (ModelConfig::latent_dim)
  bool unnormalized_experts = false;  // no ModelConfig::normalized_experts, where a file is silent
  float swiglu_limit = 0;             // of experts (Backend::ClampedSwiGlu); 0: SwiGLU
  FusedExperts hugging_face_experts = FusedExperts::kNever;
  bool gguf_tiled_states = false;  // GGUF orders value heads of states as StateLayout::tiled
  // Folders keep all that states are made of in two matrices, with rows by key heads.
  bool hugging_face_fused_states = false;
  // Folders keep the rows of a layer's gate, then those of what it gates, in one matrix.
  std::string_view hugging_face_gate_up = {};
  bool yarn_truncates = true;       // Yarn::truncate, which no key of GGUF says that others read
  std::string_view gguf_name = {};  // GGUF's general.architecture, if it is not `name`

  std::string_view GgufName() const { return gguf_name.empty() ? name : gguf_name; }
};

// ModelConfig::local_rope_base, of those that have one, where a file leaves it out.
inline constexpr double kLocalRopeBase = 10000;
// StateKind::kDeltaRule: each so many-th layer attends, where a file does not say which do.
inline constexpr int64_t kAttentionEvery = 4;

// The key of the norms' epsilon, behind the architecture's name.
inline constexpr const char* kRmsEpsilonKey = "attention.layer_norm_rms_epsilon";
inline const char* GgufEpsilonKey(const Architecture& architecture) {
  const bool rms = architecture.norm == NormKind::kRms && !architecture.gguf_layer_epsilon;
  return rms ? kRmsEpsilonKey : "attention.layer_norm_epsilon";
}

// ModelConfig::attention_chunk, query_floor and query_beta, and head_norms by the number of
// experts, where a file does not say them, as no .gguf file does (llama.cpp's llama4).
inline constexpr int64_t kChunk = 8192, kQueryFloor = 8192;
inline constexpr double kOwnQueryBeta = 0.1;
inline constexpr int64_t kExpertsWithoutHeadNorms = 128;

// The metadata of an Apertus file that lists a number of each layer: its prefix, before "alpha_p".
inline constexpr std::string_view kGgufXielu = "xielu.";

// Behind it, of Ministral 3: Yarn::query_beta; and behind "rope.scaling.", by the attention factor
// of which scale the usual one is divided (transformers' mscale_all_dim).
inline constexpr const char* kQueryBeta = "attention.temperature_scale";
inline constexpr const char* kYarnDivisor = "yarn_log_multiplier";
// With latent attention it is Yarn::score_scale times so much (llama.cpp's converter).
inline constexpr double kGgufScoreScale = 0.1;
// The epsilon of norms of latents, whatever that of the others (DeepSeek's and transformers' code).
inline constexpr float kLatentEpsilon = 1e-6f;

// All that there are.
std::span<const Architecture> Architectures();
// Null if unknown.
const Architecture* FindArchitecture(std::string_view name);
// The one that a GGUF file means by the name, `experts`: if it says how many there are, `sigmoid`:
// whose routers score by sigmoids. Null if unknown.
const Architecture* FindGgufArchitecture(std::string_view name, bool experts, bool sigmoid);
// The architecture of a checkpoint's model. It is known: opening the checkpoint checks that.
const Architecture& ArchitectureOf(const ModelConfig& config);
// "llama, gpt2"
std::string KnownArchitectures();

// Sets what files do not say because it follows from the rest: which layers rotate, and by what.
void CompleteConfig(ModelConfig& config);

// The n where each n-th of the layers is `special` and no other; more than there are layers where
// none is. Null: there is no such n.
std::optional<int64_t> PeriodOf(const std::vector<bool>& special);

// The tensors that a model has.
std::vector<const TensorRow*> TensorsOf(const ModelConfig& config);
// Whether a layer has such a tensor of them.
inline bool InLayer(const TensorRow& row, const ModelConfig& config, int64_t layer) {
  return InLayer(row.part) && (row.in_layer == nullptr || row.in_layer(config, layer)) &&
         !(config.KeepsState(layer) ? InAttention : InState)(row.part);
}

// A tensor by its name in a file; of rows of that name, the one that the model has, where its
// configuration is given.
struct TensorName {
  const TensorRow* row = nullptr;  // null: the architecture has none of that name
  std::string_view layer = {};     // its number, in a layer
  std::string_view suffix = {};    // ".weight" or ".bias"
  std::string_view expert = {};    // its number, of a matrix of an expert; empty: of all of them
};
TensorName ParseTensorName(const Architecture& architecture, Container kind, std::string_view name,
                           const ModelConfig* config = nullptr);
std::string SpellTensorName(const Architecture& architecture, Container kind,
                            const TensorName& name);

// Row i of the model's is row [i] of the file's; empty: they are the same.
std::vector<int32_t> FileRowOrder(const TensorRow& row, const ModelConfig& config, Container kind);
// Row i of the second file is row [i] of the first, given the model's rows in both.
std::vector<int32_t> OrderBetween(std::span<const int32_t> first, std::span<const int32_t> second);

// The part of so many of ModelConfig::StateUnits, key heads with their value heads or channels, in
// a page of states. Without states: as by default.
inline StateLayout StateOf(const ModelConfig& config, int64_t units) {
  if (!config.HasStates()) return {};
  if (config.state_key_heads == 0) return {.channels = units, .taps = config.conv_taps};
  const int64_t key_heads = units, heads = config.state_heads / config.state_key_heads * units;
  return {.channels = 2 * key_heads * config.state_key_dim + heads * config.state_value_dim,
          .taps = config.conv_taps,
          .key_heads = key_heads,
          .heads = heads,
          .key_dim = config.state_key_dim,
          .value_dim = config.state_value_dim,
          .tiled = config.tiled_states};
}

}  // namespace treadle
