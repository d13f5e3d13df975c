// A decoder's weights, from a checkpoint.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/status.h"
#include "models/decoder.h"
#include "models/tensor_parallel.h"

namespace treadle {
namespace {

// Where tensors are loaded to.
constexpr std::pair<Part, Linear LayerWeights::*> kLinears[] = {
    {Part::kEmbedding, &LayerWeights::embedding},
    {Part::kPositions, &LayerWeights::positions},
    {Part::kHead, &LayerWeights::head},
    {Part::kQueryDown, &LayerWeights::query_down},
    {Part::kQ, &LayerWeights::q},
    {Part::kK, &LayerWeights::k},
    {Part::kV, &LayerWeights::v},
    {Part::kQkv, &LayerWeights::qkv},
    {Part::kAttentionOutput, &LayerWeights::out},
    {Part::kStateInput, &LayerWeights::state_input},
    {Part::kStateGate, &LayerWeights::state_gate},
    {Part::kStateBeta, &LayerWeights::state_beta},
    {Part::kStateDecay, &LayerWeights::state_decay},
    {Part::kStateOutput, &LayerWeights::state_output},
    {Part::kGate, &LayerWeights::gate},
    {Part::kUp, &LayerWeights::up},
    {Part::kGateUp, &LayerWeights::gate_up},
    {Part::kDown, &LayerWeights::down},
    {Part::kRouter, &LayerWeights::router},
    {Part::kSharedRouter, &LayerWeights::shared_router},
    {Part::kSharedGate, &LayerWeights::shared_gate},
    {Part::kSharedUp, &LayerWeights::shared_up},
    {Part::kSharedDown, &LayerWeights::shared_down},
    {Part::kLayerEmbedding, &LayerWeights::layer_embedding},
    {Part::kLayerInputProjection, &LayerWeights::layer_input_projection},
    {Part::kInputGate, &LayerWeights::input_gate},
    {Part::kInputProjection, &LayerWeights::input_projection}};
constexpr std::pair<Part, std::vector<Linear> LayerWeights::*> kExperts[] = {
    {Part::kExpertGate, &LayerWeights::expert_gate},
    {Part::kExpertUp, &LayerWeights::expert_up},
    {Part::kExpertDown, &LayerWeights::expert_down}};
constexpr std::pair<Part, Norm LayerWeights::*> kNorms[] = {
    {Part::kOutputNorm, &LayerWeights::output_norm},
    {Part::kEmbeddingNorm, &LayerWeights::embedding_norm},
    {Part::kQNorm, &LayerWeights::q_norm},
    {Part::kQueryDownNorm, &LayerWeights::query_norm},
    {Part::kLatentNorm, &LayerWeights::latent_norm},
    {Part::kStateNorm, &LayerWeights::state_norm},
    {Part::kAttentionNorm, &LayerWeights::attention_norm},
    {Part::kPostAttentionNorm, &LayerWeights::post_attention_norm},
    {Part::kRouterNorm, &LayerWeights::router_norm},
    {Part::kExpertNorm, &LayerWeights::expert_norm},
    {Part::kPostDenseNorm, &LayerWeights::post_dense_norm},
    {Part::kPostExpertNorm, &LayerWeights::post_expert_norm},
    {Part::kPostFfnNorm, &LayerWeights::post_ffn_norm},
    {Part::kKNorm, &LayerWeights::k_norm},
    {Part::kFfnNorm, &LayerWeights::ffn_norm},
    {Part::kLayerInputNorm, &LayerWeights::layer_input_norm},
    {Part::kPostInputNorm, &LayerWeights::post_input_norm}};

template <typename Table>
auto MemberOf(const Table& table, Part part) {
  const auto* found = std::ranges::find(table, part, [](const auto& row) { return row.first; });
  TREADLE_CHECK(found != std::end(table));
  return found->second;
}

// All features of some heads.
ShardRange Features(ShardRange heads, int64_t head_dim, int64_t first = 0) {
  return {first + heads.begin * head_dim, first + heads.end * head_dim};
}

// Sets what a file says of an xIELU. Its two factors are softplus of what is stored, to the second
// of which the slope is added.
void SetXielu(Part part, float number, XieluScales& scales) {
  const auto softplus = static_cast<float>(std::log1p(std::exp(-std::fabs(double{number}))) +
                                           std::fmax(double{number}, 0.0));
  if (part == Part::kXieluPositive) scales.positive = softplus;
  if (part == Part::kXieluNegative) scales.negative = softplus;
  if (part == Part::kXieluSlope) scales.slope = number, scales.negative += number;
  if (part == Part::kXieluLargest) scales.largest = number;
}

}  // namespace

const Linear& LinearOf(const LayerWeights& weights, Part part, int64_t expert) {
  if (!InExperts(part)) return weights.*MemberOf(kLinears, part);
  return (weights.*MemberOf(kExperts, part))[static_cast<size_t>(expert)];
}

absl::Status Decoder::Load(const Checkpoint& checkpoint, const LoadOptions& options) {
  config_ = checkpoint.config();
  architecture_ = &ArchitectureOf(config_);
  layers_ = options.layers;
  shard_ = options.shard;
  vocab_ = PartOf(config_.vocab, 1, shard_);
  heads_ = QueryHeads(config_, shard_);
  const auto shape_of = [&](const ModelConfig& own) {
    const auto features = [&](int64_t all) {
      return FfnFeatures(checkpoint, options.weights, shard_, all);
    };
    return LayerShape{own, KvHeads(own, shard_), features(own.ffn_hidden),
                      features(own.shared_hidden)};
  };
  const LayerShape whole = shape_of(config_);
  kv_heads_ = whole.kv_heads.size();
  const int64_t end = options.without_layers ? layers_.begin : layers_.end;
  for (int64_t i = layers_.begin; i < end; ++i) {
    shapes_.push_back(shape_of(config_.OfLayer(i)));
    if (config_.Local(i)) local_kv_heads_ = shapes_.back().kv_heads.size();
  }
  layer_weights_.resize(static_cast<size_t>(end - layers_.begin));
  WeightLoader loader(checkpoint, backend_, options);
  const std::vector<const TensorRow*> rows = TensorsOf(config_);
  const auto spell = [&](const TensorRow& row, int64_t layer, int64_t expert = 0) {
    return SpellTensorName(
        *architecture_, checkpoint.kind(),
        {.row = &row, .layer = std::to_string(layer), .expert = std::to_string(expert)});
  };
  const std::string_view prefix = architecture_->hugging_face_prefix;
  const bool prefixed = checkpoint.Find(Str(prefix, spell(*rows[0], 0), ".weight")) != nullptr;
  const auto load = [&](const TensorRow& row, int64_t layer, const LayerShape& shape,
                        LayerWeights& into) -> absl::Status {
    for (int64_t i = 0; i < (InExperts(row.part) ? config_.experts : 1); ++i) {
      const std::string name = spell(row, layer, i);
      TREADLE_RETURN_IF_ERROR(
          LoadTensor(loader, row, prefixed && row.part != Part::kHead ? Str(prefix, name) : name,
                     checkpoint, shape, into));
    }
    return absl::OkStatus();
  };
  for (const TensorRow* row : rows) {
    if (Needs(row->part)) TREADLE_RETURN_IF_ERROR(load(*row, 0, whole, outside_));
  }
  outside_bytes_ = loader.weight_bytes();
  for (int64_t i = layers_.begin; i < end; ++i) {
    for (const TensorRow* row : rows) {
      if (!InLayer(*row, config_, i)) continue;
      const auto index = static_cast<size_t>(i - layers_.begin);
      TREADLE_RETURN_IF_ERROR(load(*row, i, shapes_[index], layer_weights_[index]));
    }
  }
  if (architecture_->rotary) {
    TREADLE_RETURN_IF_ERROR(LoadRotary(checkpoint, options.max_context));
  }
  if (architecture_->alibi) TREADLE_RETURN_IF_ERROR(LoadSlopes());
  if (Needs(Part::kEmbedding)) TREADLE_RETURN_IF_ERROR(LoadScale());
  for (size_t i = 0; i < layer_weights_.size(); ++i) TREADLE_RETURN_IF_ERROR(LoadUnitNorms(i));
  table_bytes_ = rotary_.bytes() + local_rotary_.bytes() + query_scales_.bytes();
  weight_bytes_ = loader.weight_bytes() + table_bytes_;
  linears_ = loader.linears();
  ChooseTypes();
  TREADLE_RETURN_IF_ERROR(AllocateActivations(options));
  loader.Finish();
  return absl::OkStatus();
}

// Outside of layers.
bool Decoder::Needs(Part part) const {
  if (InLayer(part)) return false;
  const bool of_layers = part == Part::kLayerEmbedding || part == Part::kLayerInputProjection ||
                         part == Part::kLayerInputNorm || part == Part::kEmbedding;
  if (of_layers && config_.layer_embedding > 0) return true;
  const bool tied = part == Part::kEmbedding && config_.tied_head;
  const bool first =
      part == Part::kEmbedding || part == Part::kPositions || part == Part::kEmbeddingNorm;
  return first ? first_stage() || (tied && last_stage()) : last_stage();
}

absl::Status Decoder::LoadTensor(WeightLoader& loader, const TensorRow& row,
                                 const std::string& name, const Checkpoint& checkpoint,
                                 const LayerShape& shape, LayerWeights& weights) {
  const Checkpoint::Kind kind = checkpoint.kind();
  const bool gguf = kind == Checkpoint::Kind::kGguf;
  const int64_t n = SizeOf(row.rows, shape.config);
  const bool bias = row.bias != nullptr && row.bias(config_);
  if (row.part == Part::kSinks) {
    TREADLE_ASSIGN_OR_RETURN(weights.sinks, loader.LoadVector(name + ".weight", n, 0, 1, heads_));
    return absl::OkStatus();
  }
  if (row.part == Part::kRouterBias || row.part == Part::kExpertScale) {
    Buffer& own = row.part == Part::kRouterBias ? weights.router_bias : weights.expert_scales;
    TREADLE_ASSIGN_OR_RETURN(own, loader.LoadVector(name, n));
    return absl::OkStatus();
  }
  if (row.bare && InState(row.part)) return LoadStateVector(loader, checkpoint, row, name, weights);
  if (row.part == Part::kConvolution) {
    if (bias) {
      TREADLE_RETURN_IF_ERROR(LoadStateVector(loader, checkpoint, row, name + ".bias", weights));
    }
    return LoadStateVector(loader, checkpoint, row, name + ".weight", weights);
  }
  if (InXielu(row.part)) {
    TREADLE_ASSIGN_OR_RETURN(const float number, loader.LoadNumber(name + ".weight"));
    SetXielu(row.part, number, weights.xielu);
    return absl::OkStatus();
  }
  if (row.part == Part::kLayerScale) {
    TREADLE_ASSIGN_OR_RETURN(const float scale, loader.LoadNumber(name + ".weight"));
    TREADLE_ASSIGN_OR_RETURN(weights.layer_scale, Factor(scale));
    return absl::OkStatus();
  }
  if (row.columns == Extent::kNone) {
    Norm& norm = weights.*MemberOf(kNorms, row.part);
    norm.kind = architecture_->norm;
    norm.cols = n;
    const bool latent = row.part == Part::kQueryDownNorm || row.part == Part::kLatentNorm;
    norm.epsilon = latent ? kLatentEpsilon : config_.norm_epsilon;
    ShardRange part;
    if (row.rows == Extent::kStateValues) {  // of each key head's by themselves
      norm.cols = n / config_.state_key_heads;
      const ShardRange keys = StateKeyHeads(config_, shard_);
      part = {keys.begin * norm.cols, keys.end * norm.cols};
    }
    const bool counts_from_zero = gguf || row.part == Part::kStateNorm;
    const float more = counts_from_zero ? 0 : architecture_->hugging_face_gain;
    float scale = 1;
    if (row.rows == Extent::kHidden) {
      // The residual stream is kept divided by a scale s, and a norm of it with epsilon / s^2 gives
      // what it would with epsilon. Where s is the embedding's scale, an embedding enters the
      // stream as it is stored, and what is added is divided. Where it is the multiplier of what
      // layers add, that is added as it is.
      const auto multiplier = static_cast<float>(config_.residual_multiplier);
      const bool embedding = architecture_->embedding_scaled;
      const float square = embedding ? static_cast<float>(config_.hidden) : multiplier * multiplier;
      const bool adds = row.part == Part::kPostAttentionNorm || row.part == Part::kPostFfnNorm;
      if (adds && embedding) scale = 1 / std::sqrt(square);
      if (!adds) norm.epsilon /= square;
    }
    if (row.part == Part::kRouterNorm) scale = 1 / std::sqrt(static_cast<float>(n));
    if (row.part == Part::kLayerInputNorm) {
      scale = 1 / std::sqrt(static_cast<float>(n));
      norm.epsilon *= static_cast<float>(config_.hidden);
    }
    if (row.part == Part::kPostInputNorm) {
      norm.epsilon /= static_cast<float>(config_.layer_embedding) / 2;
    }
    TREADLE_ASSIGN_OR_RETURN(
        norm.gain, loader.LoadVector(row.bare ? name : name + ".weight", n, more, scale, part));
    if (row.part == Part::kOutputNorm && config_.logits_divisor != 1) {
      const auto divided = static_cast<float>(1 / config_.logits_divisor);
      weights.head_norm = {
          .kind = norm.kind, .epsilon = norm.epsilon, .cols = n, .gain = {}, .bias = {}};
      TREADLE_ASSIGN_OR_RETURN(weights.head_norm.gain,
                               loader.LoadVector(name + ".weight", n, more, divided));
    }
    if (bias) {
      TREADLE_ASSIGN_OR_RETURN(norm.bias, loader.LoadVector(name + ".bias", n));
    }
    return absl::OkStatus();
  }
  const auto order = FileRowOrder(row, config_, kind);
  const auto folder_order = FileRowOrder(row, config_, Checkpoint::Kind::kHuggingFace);
  WeightLoader::LinearSpec spec = {
      .name = name,
      .n = n,
      .k = SizeOf(row.columns, shape.config),
      .bias = bias,
      .row_order = order,
      .folder_order = folder_order,
      .transposed = !gguf && InLayer(row.part) && architecture_->hugging_face_transposed,
      .rows = PartsOf(row.rows, shape),
      .columns = PartsOf(row.columns, shape),
      .lookup_only =
          row.part == Part::kLayerEmbedding ||
          (!InLayer(row.part) && row.part != Part::kLayerInputProjection && !last_stage()),
      .coarse = BearsCoarse(row.part)};
  if (row.part == Part::kKeyUp) return LoadByHead(loader, spec, weights.key_up);
  if (row.part == Part::kValueUp) return LoadByHead(loader, spec, weights.value_up);
  if (InExperts(row.part)) {
    TREADLE_ASSIGN_OR_RETURN(Linear linear, loader.LoadLinear(spec));
    (weights.*MemberOf(kExperts, row.part)).push_back(std::move(linear));
    return absl::OkStatus();
  }
  for (auto& [piece, own_rows] : PiecesOf(row, shape)) {
    spec.rows = own_rows;
    TREADLE_ASSIGN_OR_RETURN(weights.*piece, loader.LoadLinear(spec));
  }
  return absl::OkStatus();
}

Decoder::Pieces Decoder::PiecesOf(const TensorRow& row, const LayerShape& shape) const {
  const std::vector<ShardRange> rows = PartsOf(row.rows, shape);
  if (row.rows == Extent::kGatedQueries && config_.gated_attention) {
    return {{&LayerWeights::q, {rows[0]}}, {&LayerWeights::q_gate, {rows[1]}}};
  }
  if (row.rows == Extent::kBetaDecay) {
    return {{&LayerWeights::state_beta, {rows[0]}}, {&LayerWeights::state_decay, {rows[1]}}};
  }
  if (row.rows != Extent::kStateProducts) return {{MemberOf(kLinears, row.part), rows}};
  // Mamba 2's channels are three parts, a convolution's one.
  const auto gates = rows.end() - 2;
  return {{&LayerWeights::state_input, {rows.begin(), gates}},
          {&LayerWeights::state_gate, {rows[rows.size() - 2]}},
          {architecture_->states == StateKind::kMamba2 ? &LayerWeights::state_decay
                                                       : &LayerWeights::state_beta,
           {rows.back()}}};
}

// This rank's; empty: all.
std::vector<ShardRange> Decoder::PartsOf(Extent extent, const LayerShape& shape) const {
  const auto& [config, kv_heads, ffn, shared] = shape;
  const int64_t dim = config.head_dim;
  const int64_t queries = SizeOf(Extent::kQueries, config), keys = SizeOf(Extent::kKeys, config);
  switch (extent) {
    case Extent::kVocab:
      return {vocab_};
    case Extent::kQueries:
      return {Features(heads_, dim)};
    case Extent::kGatedQueries:
      return {Features(heads_, dim), Features(heads_, dim, queries)};
    case Extent::kKeys:
      return {Features(kv_heads, dim)};
    case Extent::kOwnQueries:
      return {Features(heads_, config.QueryDim())};
    case Extent::kOwnValues:
      return {Features(heads_, config.value_dim)};
    case Extent::kFused:
      return {Features(heads_, dim), Features(kv_heads, dim, queries),
              Features(kv_heads, dim, queries + keys)};
    case Extent::kInner:
      return {ffn};
    case Extent::kSharedInner:
      return {shared};
    case Extent::kGateUp:
      return {ffn, {config.ffn_hidden + ffn.begin, config.ffn_hidden + ffn.end}};
    default:
      return StatePartsOf(extent);
  }
}

absl::Status Decoder::LoadRotary(const Checkpoint& checkpoint, int64_t max_positions) {
  std::vector<float> factors;
  float scale = config_.yarn ? static_cast<float>(config_.yarn->attention_factor) : 1;
  if (const auto& rope = config_.long_rope) {
    const bool is_long = max_positions > rope->original_context;
    const auto& chosen = is_long ? rope->long_factors : rope->short_factors;
    factors.assign(chosen.begin(), chosen.end());
    scale = static_cast<float>(rope->attention_factor);
  }
  if (checkpoint.Find("rope_freqs.weight") != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor,
                             checkpoint.Require("rope_freqs.weight", {config_.rope_dim / 2}));
    factors = DecodeVector(*tensor);
    for (const float factor : factors) {
      if (!(factor >= 1e-6f && factor <= kUnrotated)) {
        return InvalidArgument(checkpoint.path(), ": rope_freqs.weight holds ", factor,
                               ", expected 1e-6 to 1e30");
      }
    }
  }
  TREADLE_ASSIGN_OR_RETURN(
      rotary_, RotaryEmbedding::Create(RotaryFrequencies(config_, factors), max_positions, backend_,
                                       [scale](int64_t) { return scale; }));
  if (ScalesQueries(config_, max_positions)) {  // turned by no angle
    const std::vector<float> still(static_cast<size_t>(config_.head_dim / 2));
    const bool all = config_.query_beta == 0;  // layers, with YaRN
    const double beta = all ? config_.yarn->query_beta : config_.query_beta;
    TREADLE_ASSIGN_OR_RETURN(
        query_scales_, RotaryEmbedding::Create(still, max_positions, backend_, [&](int64_t at) {
          const int64_t times =
              all ? at / config_.yarn->original_context : (at + 1) / config_.query_floor;
          return static_cast<float>(1 + beta * std::log1p(static_cast<double>(times)));
        }));
  }
  if (config_.local_rope_base == 0) return absl::OkStatus();
  ModelConfig local = config_;
  local.rope_base = config_.local_rope_base;
  if (config_.local_head_dim > 0) local.rope_dim = config_.local_head_dim;
  local.rotated_pairs = 0;
  local.rope_linear_factor = 1;
  local.rope_scaling.reset();
  local.yarn.reset();
  TREADLE_ASSIGN_OR_RETURN(local_rotary_, RotaryEmbedding::Create(RotaryFrequencies(local, {}),
                                                                  max_positions, backend_));
  return absl::OkStatus();
}

void Decoder::ChooseTypes() {
  for (LayerWeights& layer : layer_weights_) {
    // Without norms before them, products read the residual stream as it is.
    const bool normed = layer.attention_norm.loaded();
    layer.attention_type = layer.ffn_type = layer.down_type = DType::kF32;
    if (normed) {
      layer.attention_type = InputTypeOf(
          backend_, {&layer.q, &layer.q_gate, &layer.k, &layer.v, &layer.qkv, &layer.state_input,
                     &layer.state_gate, &layer.state_beta, &layer.state_decay});
      // The rows of which more is made than products of one input.
      if (config_.latent_dim > 0) layer.attention_type = DType::kF32;
    }
    layer.out_type = DType::kF32;
    if (layer.out.loaded() && !config_.gated_attention && config_.latent_dim == 0) {
      layer.out_type = InputTypeOf(backend_, {&layer.out});
    }
    // Gather has read what experts multiply, and so has the router, which is to choose well.
    if (layer.router.loaded()) continue;
    if (normed) {
      layer.ffn_type = InputTypeOf(backend_, {&layer.gate, &layer.up, &layer.gate_up});
    }
    layer.down_type = InputTypeOf(backend_, {&layer.down});
  }
  if (last_stage()) outside_.head_type = InputTypeOf(backend_, {&head()});
}

}  // namespace treadle
