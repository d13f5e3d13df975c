#include "models/architectures/llama.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/status.h"
#include "models/activations.h"
#include "models/architectures/llama_names.h"
#include "models/rank_sums.h"
#include "models/rotary_embedding.h"
#include "models/tensor_parallel.h"
#include "models/weight_loader.h"

namespace treadle {
namespace {

const float* Values(const Buffer& buffer) { return reinterpret_cast<const float*>(buffer.data()); }

// The features of whole heads.
ShardRange Features(ShardRange heads, int64_t head_dim) {
  return {heads.begin * head_dim, heads.end * head_dim};
}

class Llama : public Model {
 public:
  explicit Llama(Backend& backend) : backend_(backend) {}

  absl::Status Load(const Checkpoint& checkpoint, const LoadOptions& options);
  absl::Status Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                       Tensor hidden) override;
  void Head(Tensor hidden, Tensor logits) override;

 private:
  struct Layer {
    Buffer attention_norm;  // [hidden]
    Linear q;               // [heads * head_dim, hidden]
    Linear k, v;            // [kv_heads * head_dim, hidden]
    Linear out;             // [hidden, heads * head_dim]
    Buffer ffn_norm;        // [hidden]
    Linear gate, up;        // [ffn_hidden, hidden]
    Linear down;            // [hidden, ffn_hidden]
    // Types of the inputs of products.
    DType qkv_type, out_type, gate_up_type, down_type;
  };

  absl::StatusOr<Layer> LoadLayer(WeightLoader& loader, const LlamaNames& names, int64_t index,
                                  bool gguf) const;
  absl::Status LoadRotary(const Checkpoint& checkpoint, int64_t max_positions);
  void ChooseTypes();
  absl::Status AllocateActivations(const LoadOptions& options);
  const Linear& head() const { return config_.tied_head ? embedding_ : head_; }
  // Memory that is free after a layer's products of its second norm, and outside of layers: for
  // rows of 16 bits, which cannot lie where floats are still to be read. [rows, cols]
  Tensor Freed(DType type, int64_t rows, int64_t cols) const {
    return DenseTensor(normed_.data, type, rows, cols);
  }
  absl::Status Attend(const Layer& layer, const KvView& kv, Communicator* ranks, Tensor hidden);
  absl::Status FeedForward(const Layer& layer, Communicator* ranks, Tensor hidden);

  // Constant after Load. heads, kv_heads, ffn_hidden and vocab in shapes: this rank's.
  Backend& backend_;
  ShardRange heads_;     // of all query heads
  ShardRange kv_range_;  // of all K/V heads
  ShardRange ffn_;       // of all inner features
  Linear embedding_;     // [vocab, hidden]; first stage, and the head if tied
  std::vector<Layer> layer_weights_;
  Buffer norm_;                    // [hidden], last stage
  Linear head_;                    // [vocab, hidden], last stage, unless tied
  DType head_type_ = DType::kF32;  // of the head's input
  RotaryEmbedding rotary_;

  // Confined to the rank's thread. Sized for f32, rows = max_batch_tokens. One buffer from normed_
  // to v_.
  RankSums sums_;
  std::unique_ptr<Activations> activations_;
  Tensor normed_;     // [num_tokens, hidden]
  Tensor q_;          // [num_tokens, heads * head_dim]
  Tensor k_, v_;      // [num_tokens, kv_heads * head_dim]
  Tensor attended_;   // [num_tokens, heads * head_dim]
  Tensor gate_, up_;  // [num_tokens, ffn_hidden]
};

absl::Status Llama::Load(const Checkpoint& checkpoint, const LoadOptions& options) {
  config_ = checkpoint.config();
  layers_ = options.layers;
  shard_ = options.shard;
  vocab_ = PartOf(config_.vocab, 1, shard_);
  heads_ = QueryHeads(config_, shard_);
  kv_range_ = KvHeads(config_, shard_);
  kv_heads_ = kv_range_.size();
  ffn_ = FfnFeatures(checkpoint, options.weights, shard_);
  const bool gguf = checkpoint.kind() == Checkpoint::Kind::kGguf;
  const LlamaNames& names = gguf ? kLlamaGgufNames : kLlamaHuggingFaceNames;
  WeightLoader loader(checkpoint, backend_, options);
  const auto table = [&](const char* name) {
    WeightLoader::LinearSpec spec = {name, config_.vocab, config_.hidden};
    spec.rows = {vocab_};
    spec.lookup_only = !last_stage();
    return loader.LoadLinear(spec);
  };
  if (first_stage() || (last_stage() && config_.tied_head)) {
    TREADLE_ASSIGN_OR_RETURN(embedding_, table(names.embedding));
  }
  for (int64_t i = layers_.begin; i < layers_.end; ++i) {
    TREADLE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(loader, names, i, gguf));
    layer_weights_.push_back(std::move(layer));
  }
  if (last_stage()) {
    TREADLE_ASSIGN_OR_RETURN(norm_, loader.LoadVector(Str(names.norm, ".weight"), config_.hidden));
    if (!config_.tied_head) {
      TREADLE_ASSIGN_OR_RETURN(head_, table(names.head));
    }
  }
  TREADLE_RETURN_IF_ERROR(LoadRotary(checkpoint, options.max_context));
  weight_bytes_ = loader.weight_bytes() + rotary_.bytes();
  ChooseTypes();
  TREADLE_RETURN_IF_ERROR(AllocateActivations(options));
  loader.Finish();
  return absl::OkStatus();
}

absl::StatusOr<Llama::Layer> Llama::LoadLayer(WeightLoader& loader, const LlamaNames& names,
                                              int64_t index, bool gguf) const {
  const std::string prefix = Str(names.layers, index, ".");
  const int64_t hidden = config_.hidden;
  const int64_t ffn = config_.ffn_hidden;
  const int64_t q_size = config_.heads * config_.head_dim;
  const int64_t kv_size = config_.kv_heads * config_.head_dim;
  const ShardRange q_part = Features(heads_, config_.head_dim);
  const ShardRange kv_part = Features(kv_range_, config_.head_dim);
  std::vector<int32_t> q_order, k_order;
  if (gguf) {
    q_order = HalfSplitOrder(config_.heads, config_.head_dim, config_.rope_dim);
    k_order = HalfSplitOrder(config_.kv_heads, config_.head_dim, config_.rope_dim);
  }
  using Bias = WeightLoader::Bias;
  const Bias bias = config_.attention_bias ? Bias::kRequired : Bias::kNone;
  // GGUF also has models with biases on Q, K and V only; there, a tensor's presence is the setting.
  const Bias out_bias = gguf && config_.attention_bias ? Bias::kIfPresent : bias;
  Layer layer;
  const auto load = [&](WeightLoader::LinearSpec spec, Linear* out) -> absl::Status {
    spec.name = prefix + spec.name;
    TREADLE_ASSIGN_OR_RETURN(*out, loader.LoadLinear(spec));
    return absl::OkStatus();
  };
  // Cut by output features, and by input features.
  const auto column_parallel = [&](const char* name, int64_t n, ShardRange part, Bias with,
                                   std::span<const int32_t> order, Linear* out) {
    return load(
        {.name = name, .n = n, .k = hidden, .bias = with, .row_order = order, .rows = {part}}, out);
  };
  const auto row_parallel = [&](const char* name, int64_t k, ShardRange part, Bias with,
                                Linear* out) {
    return load({.name = name, .n = hidden, .k = k, .bias = with, .columns = part}, out);
  };
  TREADLE_ASSIGN_OR_RETURN(layer.attention_norm,
                           loader.LoadVector(prefix + names.attention_norm + ".weight", hidden));
  TREADLE_RETURN_IF_ERROR(column_parallel(names.q, q_size, q_part, bias, q_order, &layer.q));
  TREADLE_RETURN_IF_ERROR(column_parallel(names.k, kv_size, kv_part, bias, k_order, &layer.k));
  TREADLE_RETURN_IF_ERROR(column_parallel(names.v, kv_size, kv_part, bias, {}, &layer.v));
  TREADLE_RETURN_IF_ERROR(row_parallel(names.out, q_size, q_part, out_bias, &layer.out));
  TREADLE_ASSIGN_OR_RETURN(layer.ffn_norm,
                           loader.LoadVector(prefix + names.ffn_norm + ".weight", hidden));
  const Bias none = Bias::kNone;
  TREADLE_RETURN_IF_ERROR(column_parallel(names.gate, ffn, ffn_, none, {}, &layer.gate));
  TREADLE_RETURN_IF_ERROR(column_parallel(names.up, ffn, ffn_, none, {}, &layer.up));
  TREADLE_RETURN_IF_ERROR(row_parallel(names.down, ffn, ffn_, none, &layer.down));
  return layer;
}

absl::Status Llama::LoadRotary(const Checkpoint& checkpoint, int64_t max_positions) {
  std::vector<float> factors;
  if (checkpoint.Find("rope_freqs.weight") != nullptr) {
    TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor,
                             checkpoint.Require("rope_freqs.weight", {config_.rope_dim / 2}));
    factors = DecodeVector(*tensor);
    for (const float factor : factors) {
      if (!(factor >= 1e-6f && factor <= 1e12f)) {
        return InvalidArgument(checkpoint.path(), ": rope_freqs.weight holds ", factor,
                               ", expected 1e-6 to 1e12");
      }
    }
  }
  TREADLE_ASSIGN_OR_RETURN(rotary_, RotaryEmbedding::Create(RotaryFrequencies(config_, factors),
                                                            max_positions, backend_));
  return absl::OkStatus();
}

void Llama::ChooseTypes() {
  for (Layer& layer : layer_weights_) {
    layer.qkv_type = InputTypeOf(backend_, {&layer.q, &layer.k, &layer.v});
    layer.out_type = InputTypeOf(backend_, {&layer.out});
    layer.gate_up_type = InputTypeOf(backend_, {&layer.gate, &layer.up});
    layer.down_type = InputTypeOf(backend_, {&layer.down});
  }
  if (last_stage()) head_type_ = InputTypeOf(backend_, {&head()});
}

absl::Status Llama::AllocateActivations(const LoadOptions& options) {
  activations_ = std::make_unique<Activations>(backend_, options.max_batch_tokens);
  const int64_t q_size = heads_.size() * config_.head_dim;
  const int64_t kv_size = kv_heads_ * config_.head_dim;
  const bool inner = std::ranges::any_of(
      layer_weights_, [](const Layer& layer) { return layer.down_type != DType::kF32; });
  const int64_t freed =
      std::max(inner ? options.max_batch_tokens * ffn_.size() : 0,
               head_type_ != DType::kF32 ? options.max_head_rows * config_.hidden : 0);
  TREADLE_RETURN_IF_ERROR(activations_->AddTogether(
      {{&normed_, config_.hidden}, {&q_, q_size}, {&k_, kv_size}, {&v_, kv_size}}, 2 * freed));
  const std::pair<Tensor*, int64_t> sizes[] = {
      {&attended_, q_size}, {&gate_, ffn_.size()}, {&up_, ffn_.size()}};
  for (const auto& [tensor, cols] : sizes) {
    TREADLE_ASSIGN_OR_RETURN(*tensor, activations_->Add(cols));
  }
  TREADLE_RETURN_IF_ERROR(sums_.Allocate(*activations_, config_.hidden, shard_));
  activation_bytes_ = activations_->bytes();
  return absl::OkStatus();
}

absl::Status Llama::Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                            Tensor hidden) {
  TREADLE_CHECK((ranks == nullptr) == (shard_.size == 1));
  if (first_stage()) {
    TREADLE_RETURN_IF_ERROR(
        sums_.Embed(backend_, embedding_, vocab_, batch.token_ids, ranks, hidden));
  }
  for (size_t i = 0; i < layer_weights_.size(); ++i) {
    const Layer& layer = layer_weights_[i];
    const KvView view = {kv.layout, kv.layers[i], batch.sequences};
    TREADLE_RETURN_IF_ERROR(Attend(layer, view, ranks, hidden));
    TREADLE_RETURN_IF_ERROR(FeedForward(layer, ranks, hidden));
  }
  return absl::OkStatus();
}

// hidden += W_o attention(rotate(W_q n), rotate(W_k n), W_v n), n = norm(hidden).
absl::Status Llama::Attend(const Layer& layer, const KvView& kv, Communicator* ranks,
                           Tensor hidden) {
  const int64_t rows = hidden.rows;
  const Tensor normed = RowsAs(layer.qkv_type, normed_, rows);  // [num_tokens, hidden]
  const Tensor q = q_.Rows(0, rows);                            // [num_tokens, heads * head_dim]
  const Tensor k = k_.Rows(0, rows);                            // [num_tokens, kv_heads * head_dim]
  const Tensor v = v_.Rows(0, rows);                            // [num_tokens, kv_heads * head_dim]
  const Tensor attended =
      RowsAs(layer.out_type, attended_, rows);  // [num_tokens, heads * head_dim]
  backend_.RmsNorm(hidden, Values(layer.attention_norm), config_.norm_epsilon, normed);
  const Projection qkv[] = {layer.q.To(q), layer.k.To(k), layer.v.To(v)};
  backend_.MatMul(normed, qkv);
  backend_.RotateAndStoreKv(q, k, v, &rotary_.table(), kv);
  backend_.Attention(q, kv, 1 / std::sqrt(static_cast<float>(config_.head_dim)), attended);
  return sums_.Add(backend_, layer.out, attended, ranks, hidden);
}

// hidden += W_down (silu(W_gate n) * W_up n), n = norm(hidden).
absl::Status Llama::FeedForward(const Layer& layer, Communicator* ranks, Tensor hidden) {
  const int64_t rows = hidden.rows;
  const Tensor normed = RowsAs(layer.gate_up_type, normed_, rows);  // [num_tokens, hidden]
  const Tensor gate = gate_.Rows(0, rows);                          // [num_tokens, ffn_hidden]
  const Tensor up = up_.Rows(0, rows);                              // [num_tokens, ffn_hidden]
  const Tensor inner = layer.down_type == DType::kF32               // [num_tokens, ffn_hidden]
                           ? gate
                           : Freed(layer.down_type, rows, ffn_.size());
  backend_.RmsNorm(hidden, Values(layer.ffn_norm), config_.norm_epsilon, normed);
  const Projection gate_up[] = {layer.gate.To(gate), layer.up.To(up)};
  backend_.MatMul(normed, gate_up);
  backend_.SwiGlu(gate, up, inner);
  return sums_.Add(backend_, layer.down, inner, ranks, hidden);
}

void Llama::Head(Tensor hidden, Tensor logits) {
  const Tensor normed =
      head_type_ == DType::kF32 ? hidden : Freed(head_type_, hidden.rows, hidden.cols);
  backend_.RmsNorm(hidden, Values(norm_), config_.norm_epsilon, normed);
  const Projection out[] = {head().To(logits)};
  backend_.MatMul(normed, out);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadLlama(const Checkpoint& checkpoint, Backend& backend,
                                                 const LoadOptions& options) {
  auto model = std::make_unique<Llama>(backend);
  TREADLE_RETURN_IF_ERROR(model->Load(checkpoint, options));
  return model;
}

}  // namespace treadle
