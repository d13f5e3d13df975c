// The parts of every decoder-only transformer here: weights that an architecture's description
// names, buffers for one iteration, and the way from tokens to logits. The work of a layer is the
// architecture's own (Architecture::layer).
//
// Thread safety: as Model.
#pragma once

#include <initializer_list>
#include <memory>
#include <vector>

#include "models/activations.h"
#include "models/adapter.h"
#include "models/adapters/adapter_file.h"
#include "models/architectures/architecture.h"
#include "models/architectures/rotary_embedding.h"
#include "models/expert_rows.h"
#include "models/linear.h"
#include "models/model.h"
#include "models/rank_sums.h"
#include "models/weight_loader.h"

namespace treadle {

// A vector on the device; null: there is none.
inline const float* Values(const Buffer& buffer) {
  return reinterpret_cast<const float*>(buffer.data());
}

struct Norm {
  NormKind kind = NormKind::kRms;
  float epsilon = 0;
  int64_t cols = 0;
  Buffer gain;  // [cols] f32
  Buffer bias;  // of layer norms
  bool loaded() const { return gain.data() != nullptr; }
  // Shapes as Backend::RmsNorm's, which alone can accumulate.
  void Apply(Backend& backend, Tensor x, Tensor out, bool accumulate = false) const;
};

// One layer's weights, or those outside of layers. Extents: this rank's. What an architecture's
// description lacks is not loaded.
struct LayerWeights {
  Linear embedding;               // [vocab, hidden]; first stage, and the head if tied
  Linear positions;               // [context, hidden]; first stage, where positions are embedded
  Norm embedding_norm;            // [hidden]; first stage, of all that is embedded
  Norm embedding_scale;           // [hidden]; first stage: a factor, as a norm (Decoder::LoadScale)
  Linear layer_embedding;         // [vocab, layers * layer_embedding], where layers have their own
  Linear layer_input_projection;  // [layers * layer_embedding, hidden], likewise
  Norm layer_input_norm;          // [layer_embedding], likewise
  Norm output_norm;               // [hidden], last stage
  Norm head_norm;                 // that of logits which are divided; else not loaded
  Linear head;                    // [vocab, hidden], last stage, unless tied
  Norm attention_norm, ffn_norm;  // [hidden]
  Norm post_attention_norm;       // [hidden], of what is added
  Norm post_ffn_norm;             // likewise
  Norm q_norm, k_norm;            // [head_dim], or of all heads of all ranks together
  Norm v_norm;                    // [head_dim], all ones; so may q_norm and k_norm be
  Linear input_gate;              // [layer_embedding, hidden]
  Linear input_projection;        // [hidden, layer_embedding]
  Norm post_input_norm;           // [hidden], of what these add
  Norm layer_scale;               // [hidden]: a factor, as a norm
  Buffer sinks;                   // [heads] f32
  XieluScales xielu;              // where the activation is one
  // Latent attention: what makes q's input, its norm, that of the latent, and each head's products.
  Linear query_down;                     // [query_latent_dim, hidden]; or q reads the hidden state
  Norm query_norm;                       // [query_latent_dim]
  Norm latent_norm;                      // [latent_dim]
  std::vector<Linear> key_up, value_up;  // [latent_dim, unrotated_dim], [value_dim, latent_dim]
  Linear q;       // [heads * head_dim, hidden]; where one norm is of all: all
  Linear k, v;    // [kv_heads * head_dim, hidden]; likewise k
  Linear q_gate;  // as q, of gated attention
  Linear qkv;     // q, k and v as one
  Linear out;     // [hidden, heads * head_dim]
  // Weights of layers that keep a state.
  Linear state_input;              // [channels, hidden]
  Linear state_gate;               // [state_heads * state_value_dim, hidden]
  Linear state_beta, state_decay;  // [state_heads, hidden]; the first of a convolution: its gates
  Linear state_output;             // [hidden, state_heads * state_value_dim]
  Norm state_norm;          // [state_value_dim]; of all heads of a key head: of all of the rank's
  Buffer convolution;       // [taps, channels] f32
  Buffer convolution_bias;  // [channels] f32, or empty
  Buffer decay_rates, decay_biases, state_skips;  // [state_heads] f32
  Linear gate, up;                                // [ffn_hidden, hidden]
  Linear gate_up;                                 // the two as one
  Linear down;                                    // [hidden, ffn_hidden]
  Linear router;                                  // [experts, hidden]
  // The gate, up and down of each expert. [experts]
  std::vector<Linear> expert_gate, expert_up, expert_down;
  Buffer router_bias, expert_scales;  // [experts] f32
  // Experts beside a network for all rows: norms of what is read, and of what each makes. [hidden]
  Norm router_norm, expert_norm, post_dense_norm, post_expert_norm;
  Linear shared_router;                        // [1, hidden]
  Linear shared_gate, shared_up, shared_down;  // as gate, up and down: the expert for all rows
  // The types of the products' inputs.
  DType attention_type, out_type, ffn_type, down_type, head_type = DType::kF32;
};

// A linear layer that was loaded; of experts', the one of that number.
const Linear& LinearOf(const LayerWeights& weights, Part part, int64_t expert);

// A layer's sizes, and this rank's part of it.
struct LayerShape {
  ModelConfig config;   // ModelConfig::OfLayer
  ShardRange kv_heads;  // of all K/V heads
  ShardRange ffn;       // of all inner features
  ShardRange shared;    // of those of the expert for all rows
};

// One iteration's rows in one layer, and what is done with them.
struct LayerPass {
  Backend& backend;
  const ModelConfig& config;  // LayerShape::config
  const Architecture& architecture;
  const RotaryTable* rotary;        // null: nothing rotates
  const RotaryTable* query_scales;  // factors of queries, as a rotation by no angle; null: none
  RankSums& sums;
  Communicator* ranks;
  KvView kv;
  Tensor hidden;        // [num_tokens, hidden], the residual stream
  Tensor attention_in;  // [num_tokens, hidden], of the type that its products read
  Tensor q;             // [num_tokens, heads * head_dim], as LayerWeights::q makes it
  Tensor q_gate;        // as q, of gated attention
  Tensor k, v;          // [num_tokens, kv_heads * head_dim]; likewise k; null: an earlier layer's
  Tensor own_q, own_k;  // the heads of q and k that are this rank's
  Tensor qkv;           // the three side by side, where one matrix makes them
  Tensor query_latent;  // [num_tokens, query_latent_dim]; this and those below: latent attention's
  Tensor latent_q;      // [num_tokens, heads * head_dim], queries of latents
  Tensor by_head;       // [num_tokens, heads * most], rows of one head behind those of another
  Tensor values;        // [num_tokens, heads * value_dim]
  std::span<const int32_t> head_rows;  // the order of by_head, in rows of all heads
  Tensor attended;      // [num_tokens, heads * head_dim], as the next product reads it
  Tensor ffn_in;        // [num_tokens, hidden], likewise
  Tensor gate, up;      // [num_tokens, ffn_hidden]; with experts, of the one for all rows
  Tensor shared_scale;  // [num_tokens, 1], of what that one makes
  Tensor gate_up;       // the two side by side, where one matrix makes them
  Tensor inner;         // [num_tokens, ffn_hidden], likewise
  Tensor half;          // [num_tokens, hidden], what is normalized before it is added
  Tensor layer_input;   // [num_tokens, layer_embedding], the layer's own embedding
  Tensor state_in;      // [num_tokens, channels]; this and those below: of layers that keep a state
  Tensor state_gate, state_out;    // [num_tokens, state_heads * state_value_dim]
  Tensor state_beta, state_decay;  // [num_tokens, state_heads]
  Tensor state_all;                // [num_tokens, values of all ranks], where these share key heads
  ExpertRows& experts;
  ExpertUse& expert_use;
  AdapterRows& adapters;

  void Normalize(const Norm& by, Tensor x, Tensor out) const { by.Apply(backend, x, out); }
  // The normalized residual stream, in `out`; the stream itself, where the model has no such norm.
  Tensor Normalized(const Norm& by, Tensor out) const {
    if (by.loaded()) Normalize(by, hidden, out);
    return by.loaded() ? out : hidden;
  }
  // Each head of x by itself, or all together, as the norm is made; in place.
  void NormalizeHeads(const Norm& by, Tensor x) const;
  // The products, at most four, share their input; rows' adapters add to them.
  void MatMul(Tensor x, std::initializer_list<LinearProduct> products) const;
  // out = silu(gate) * up of the two products, or gelu's; `gate` and `up` may be written.
  void GatedMatMul(Tensor x, const Linear& by_gate, const Linear& by_up, Backend::Gate by,
                   Tensor out) const;
  // Rotates q and k, where Attend does not because norms come between.
  void Rotate() const;
  // attended = softmax(q K^T / sqrt(d)) V of each head, d its size or what the model says, once k
  // and v are in the cache, where they are this layer's; q and k rotate first.
  void Attend() const;
  // hidden += what latent attention makes of x, [num_tokens, hidden].
  absl::Status AddLatent(const LayerWeights& weights, Tensor x) const;
  // out = W x of each head's own W; x: [num_tokens * heads, k], out: [num_tokens * heads, n].
  void MultiplyByHead(Tensor x, std::span<const Linear> weights, Tensor out) const;
  // hidden += what a layer that keeps a state makes of x, [num_tokens, hidden].
  absl::Status AddState(const LayerWeights& weights, Tensor x) const;
  // Mamba 2's norm of state_out, in place: of all value heads of a key head together, which several
  // ranks may hold.
  absl::Status NormalizeState(const Norm& by) const;
  void RotateAlone(Tensor x, const RotaryTable& by) const;
  // hidden += norm(W x + b), of the sum over all ranks; without a norm where it is not loaded.
  absl::Status AddProduct(const Linear& linear, Tensor x, const Norm& by = {}) const;
  // Runs the experts that the router chooses by `routed` on x, for experts.Mix: both [num_tokens,
  // hidden] f32.
  absl::Status RunExperts(const LayerWeights& weights, Tensor routed, Tensor x) const;
  // hidden += the weighted sum of what experts make of the rows of ffn_in, and what the one for all
  // rows makes, over all ranks.
  absl::Status AddExperts(const LayerWeights& weights) const;
};

class Decoder : public Model {
 public:
  explicit Decoder(Backend& backend) : backend_(backend) {}

  // Options: complete and checked (Model::Load).
  absl::Status Load(const Checkpoint& checkpoint, const LoadOptions& options);
  absl::Status Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                       Tensor hidden) override;
  void Normalize(Tensor hidden) override {
    if (observer_) observer_(layers_.end);
    outside_.output_norm.Apply(backend_, hidden, hidden);
  }
  using Model::Head;
  void Head(Tensor hidden, Tensor logits, std::span<const Adapter* const> adapters) override;
  absl::StatusOr<std::shared_ptr<const Adapter>> LoadAdapter(
      const AdapterFile& file) const override;

  // Runs the layers of `lender`, which outlives it, on another host backend and in activations of
  // its own: for RunLayer, and nothing else.
  static absl::StatusOr<std::unique_ptr<Decoder>> Borrow(const Decoder& lender, Backend& backend,
                                                         int64_t max_batch_tokens);

  // out = the embedding of the batch's tokens and positions, [num_tokens, hidden].
  absl::Status Embed(const Batch& batch, Communicator* ranks, Tensor out);
  // Layer `index` of this range alone, as Forward runs it: for gradients, which run a layer again.
  absl::Status RunLayer(size_t index, const Batch& batch, const KvPages& kv, Communicator* ranks,
                        Tensor hidden);
  const LayerWeights& weights(size_t index) const { return owner().layer_weights_[index]; }
  // The factor of a soft prompt's rows that makes them rows of the table of embeddings, and such a
  // row's own on its way into the first layer.
  float SoftPromptScale() const;
  double EmbeddingScale() const {
    return config_.embedding_multiplier / config_.residual_multiplier;
  }
  // Rows of the table of embeddings; one rank with the first layer. [ids, hidden] f32
  absl::Status ReadEmbedding(std::span<const int32_t> ids, Tensor out) {
    return sums_.Embed(backend_, outside_.embedding, vocab_, ids, nullptr, out);
  }
  // An adapter of nothing, to be filled with about so many bytes.
  std::unique_ptr<Adapter> NewAdapter(uint64_t bytes) const {
    return std::make_unique<Adapter>(linears_, bytes);
  }

 private:
  bool Needs(Part part) const;
  // This range's layer that the factors are for; null: another range's.
  const LayerWeights* WeightsFor(const AdapterFactors& factors) const;
  absl::Status AddFactors(const AdapterFile& file, const AdapterFactors& factors,
                          Adapter& adapter) const;
  absl::Status LoadTensor(WeightLoader& loader, const TensorRow& row, const std::string& name,
                          const Checkpoint& checkpoint, const LayerShape& shape,
                          LayerWeights& weights);
  absl::Status LoadStateVector(WeightLoader& loader, const Checkpoint& checkpoint,
                               const TensorRow& row, const std::string& name,
                               LayerWeights& weights);
  absl::Status AllocateStates();
  // The layers whose rows one matrix has, with this rank's rows of each; no rows: all.
  using Pieces = std::vector<std::pair<Linear LayerWeights::*, std::vector<ShardRange>>>;
  Pieces PiecesOf(const TensorRow& row, const LayerShape& shape) const;
  absl::Status AllocateLatents();
  // A linear layer for each of this rank's heads, whose rows lie one behind the other's.
  absl::Status LoadByHead(WeightLoader& loader, WeightLoader::LinearSpec spec,
                          std::vector<Linear>& heads) const;
  void OrderByHead(int64_t rows);
  // This rank's of states: of value heads, and of channels.
  std::vector<ShardRange> ValueHeads() const;
  std::vector<ShardRange> ChannelParts() const;
  std::vector<ShardRange> StatePartsOf(Extent extent) const;  // empty: all
  absl::Status LoadRotary(const Checkpoint& checkpoint, int64_t max_positions);
  absl::Status LoadSlopes();
  absl::Status LoadScale();
  // Norms of heads that are all ones: of queries and keys, or of values.
  absl::Status LoadUnitNorms(size_t index);
  // A factor of rows [*, hidden], as a norm.
  absl::StatusOr<Norm> Factor(double factor);
  std::vector<ShardRange> PartsOf(Extent extent, const LayerShape& shape) const;
  // layer_inputs_ = what each layer's own embedding of the batch's tokens gives, made from these
  // and the embedding, which the first stage has in `hidden`.
  absl::Status MakeLayerInputs(const Batch& batch, Communicator* ranks, Tensor hidden);
  void ChooseTypes();
  absl::Status AllocateActivations(const LoadOptions& options);
  const Linear& head() const { return config_.tied_head ? outside_.embedding : outside_.head; }
  // Memory that is free after the products of a layer's second norm, and outside of layers: for
  // rows of 16 bits, which cannot lie where floats are still to be read. [rows, cols]
  Tensor Freed(DType type, int64_t rows, int64_t cols) const {
    return DenseTensor(normed_.data, type, rows, cols);
  }
  // The view that layer `index` of this range has of the cache.
  KvView ViewOf(size_t index, const Batch& batch, const KvPages& kv) const;
  LayerPass PassOf(size_t index, const KvView& kv, Communicator* ranks, Tensor hidden);

  // The decoder whose weights and tables these layers are.
  const Decoder& owner() const { return lender_ == nullptr ? *this : *lender_; }

  // Constant after Load. heads, kv_heads, ffn_hidden and vocab in shapes: this rank's.
  Backend& backend_;
  const Decoder* lender_ = nullptr;  // Borrow's
  const Architecture* architecture_ = nullptr;
  ShardRange heads_;                // of all query heads
  std::vector<LayerShape> shapes_;  // of this range's layers
  LayerWeights outside_;
  std::vector<LayerWeights> layer_weights_;
  RotaryEmbedding rotary_, local_rotary_;  // the second: of local layers, if they rotate apart
  RotaryEmbedding query_scales_;           // LayerPass::query_scales
  Buffer slopes_;                          // KvView::slopes, where scores fall; else empty
  int32_t linears_ = 0;                    // that were loaded

  // Confined to the rank's thread. Sized for f32, rows = max_batch_tokens. One buffer from normed_
  // to v_. Columns of q_ to inner features: those of the layer that has the most.
  RankSums sums_;
  ExpertRows experts_;
  AdapterRows adapters_, head_adapters_;  // of the rows of a batch, and of one call of the head
  std::unique_ptr<Activations> activations_;
  Tensor normed_;  // [num_tokens, hidden]
  Tensor q_;       // [num_tokens, heads * head_dim]
  Tensor q_gate_;  // as q_, of gated attention
  Tensor k_, v_;   // [num_tokens, kv_heads * head_dim]
  Tensor qkv_;     // [num_tokens, (heads + 2 * kv_heads) * head_dim], instead of the three
  Tensor query_latent_, latent_q_, by_head_, values_;  // as LayerPass'
  std::vector<int32_t> head_rows_;                     // of head_rows_.size() / heads rows
  Tensor attended_;                                    // [num_tokens, heads * head_dim]
  Tensor gate_, up_;                                   // [num_tokens, ffn_hidden]
  Tensor gate_up_;       // [num_tokens, 2 * ffn_hidden], instead of the two
  Tensor shared_scale_;  // [num_tokens, 1]
  Tensor half_;          // [num_tokens, hidden], where halves of layers are normalized
  Tensor layer_inputs_;  // [num_tokens, layers * layer_embedding], where layers have their own
  Tensor state_in_, state_gate_, state_out_, state_beta_, state_decay_, state_all_;  // LayerPass'
};

}  // namespace treadle
