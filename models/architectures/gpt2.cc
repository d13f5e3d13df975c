#include "models/architectures/gpt2.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/status.h"
#include "models/activations.h"
#include "models/architectures/gpt2_names.h"
#include "models/rank_sums.h"
#include "models/tensor_parallel.h"
#include "models/weight_loader.h"

namespace treadle {
namespace {

// Gain and bias of a layer norm.
struct Norm {
  Buffer weight;  // [hidden]
  Buffer bias;    // [hidden]
};

const float* Values(const Buffer& buffer) { return reinterpret_cast<const float*>(buffer.data()); }

class Gpt2 : public Model {
 public:
  explicit Gpt2(Backend& backend) : backend_(backend) {}

  absl::Status Load(const Checkpoint& checkpoint, const LoadOptions& options);
  absl::Status Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                       Tensor hidden) override;
  void Head(Tensor hidden, Tensor logits) override;

 private:
  struct Layer {
    Norm attention_norm;
    Linear qkv;  // [3 * size, hidden]: Q, K, V
    Linear out;  // [hidden, size]
    Norm ffn_norm;
    Linear up;    // [ffn_hidden, hidden]
    Linear down;  // [hidden, ffn_hidden]
    // Types of the inputs of products.
    DType qkv_type, out_type, up_type, down_type;
  };
  // Where a file's tensors are, and how its matrices lie (Conv1D keeps [k, n]).
  struct Source {
    Gpt2Names names;
    std::string prefix;
    bool transposed = false;
  };

  absl::StatusOr<Norm> LoadNorm(WeightLoader& loader, const std::string& name) const;
  absl::StatusOr<Layer> LoadLayer(WeightLoader& loader, const Source& source, int64_t index) const;
  absl::Status LoadEnds(WeightLoader& loader, const Source& source);
  void ChooseTypes();
  absl::Status AllocateActivations(const LoadOptions& options);
  const Linear& head() const { return config_.tied_head ? embedding_ : head_; }
  // Memory that is free after a layer's product of its second norm, and outside of layers: for rows
  // of 16 bits, which cannot lie where floats are still to be read. [rows, cols]
  Tensor Freed(DType type, int64_t rows, int64_t cols) const {
    return DenseTensor(normed_.data, type, rows, cols);
  }
  void ApplyNorm(const Norm& norm, Tensor x, Tensor out) const {
    backend_.LayerNorm(x, Values(norm.weight), Values(norm.bias), config_.norm_epsilon, out);
  }
  absl::Status Attend(const Layer& layer, const KvView& kv, Communicator* ranks, Tensor hidden);
  absl::Status FeedForward(const Layer& layer, Communicator* ranks, Tensor hidden);

  // Constant after Load. size, ffn_hidden and vocab in shapes: this rank's.
  Backend& backend_;
  ShardRange part_;   // of the features of Q, K and V: its heads'
  ShardRange ffn_;    // of all inner features
  Linear embedding_;  // [vocab, hidden]; first stage, and the head if tied
  Linear positions_;  // [context, hidden], first stage
  std::vector<Layer> layer_weights_;
  Norm norm_;                      // last stage
  Linear head_;                    // [vocab, hidden], last stage, unless tied
  DType head_type_ = DType::kF32;  // of the head's input

  // Confined to the rank's thread. Sized for f32, rows = max_batch_tokens. One buffer for normed_
  // and qkv_.
  RankSums sums_;
  std::unique_ptr<Activations> activations_;
  Tensor normed_;    // [num_tokens, hidden]
  Tensor qkv_;       // [num_tokens, 3 * size]
  Tensor attended_;  // [num_tokens, size]
  Tensor up_;        // [num_tokens, ffn_hidden]
};

absl::Status Gpt2::Load(const Checkpoint& checkpoint, const LoadOptions& options) {
  config_ = checkpoint.config();
  layers_ = options.layers;
  shard_ = options.shard;
  vocab_ = PartOf(config_.vocab, 1, shard_);
  const ShardRange heads = QueryHeads(config_, shard_);
  kv_heads_ = heads.size();
  part_ = {heads.begin * config_.head_dim, heads.end * config_.head_dim};
  ffn_ = FfnFeatures(checkpoint, options.weights, shard_);
  if (config_.kv_heads != config_.heads || config_.heads * config_.head_dim != config_.hidden) {
    return InvalidArgument(checkpoint.path(), ": gpt2 with ", config_.heads, " heads of ",
                           config_.head_dim, " and ", config_.kv_heads,
                           " K/V heads, expected as many of each, together of size ",
                           config_.hidden);
  }
  const bool gguf = checkpoint.kind() == Checkpoint::Kind::kGguf;
  Source source{gguf ? kGpt2GgufNames : kGpt2HuggingFaceNames, "", !gguf};
  // Files saved from the bare model have no prefix.
  if (checkpoint.Find("transformer.wte.weight") != nullptr) source.prefix = "transformer.";
  WeightLoader loader(checkpoint, backend_, options);
  TREADLE_RETURN_IF_ERROR(LoadEnds(loader, source));
  for (int64_t i = layers_.begin; i < layers_.end; ++i) {
    TREADLE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(loader, source, i));
    layer_weights_.push_back(std::move(layer));
  }
  weight_bytes_ = loader.weight_bytes();
  ChooseTypes();
  TREADLE_RETURN_IF_ERROR(AllocateActivations(options));
  loader.Finish();
  return absl::OkStatus();
}

absl::StatusOr<Norm> Gpt2::LoadNorm(WeightLoader& loader, const std::string& name) const {
  Norm norm;
  TREADLE_ASSIGN_OR_RETURN(norm.weight, loader.LoadVector(name + ".weight", config_.hidden));
  TREADLE_ASSIGN_OR_RETURN(norm.bias, loader.LoadVector(name + ".bias", config_.hidden));
  return norm;
}

absl::Status Gpt2::LoadEnds(WeightLoader& loader, const Source& source) {
  const auto table = [&](const std::string& name) {
    return loader.LoadLinear({.name = name,
                              .n = config_.vocab,
                              .k = config_.hidden,
                              .rows = {vocab_},
                              .lookup_only = !last_stage()});
  };
  if (first_stage() || (last_stage() && config_.tied_head)) {
    TREADLE_ASSIGN_OR_RETURN(embedding_, table(source.prefix + source.names.embedding));
  }
  if (first_stage()) {
    TREADLE_ASSIGN_OR_RETURN(positions_,
                             loader.LoadLinear({.name = source.prefix + source.names.positions,
                                                .n = config_.context,
                                                .k = config_.hidden,
                                                .lookup_only = !last_stage()}));
  }
  if (!last_stage()) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(norm_, LoadNorm(loader, source.prefix + source.names.norm));
  if (config_.tied_head) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(head_, table(source.names.head));
  return absl::OkStatus();
}

absl::StatusOr<Gpt2::Layer> Gpt2::LoadLayer(WeightLoader& loader, const Source& source,
                                            int64_t index) const {
  const Gpt2Names& names = source.names;
  const std::string prefix = Str(source.prefix, names.layers, index, ".");
  const int64_t hidden = config_.hidden;
  using Ranges = std::vector<ShardRange>;
  // Cut by output features (`rows`) or by input features (`columns`).
  const auto linear = [&](const char* name, int64_t n, int64_t k, Ranges rows, ShardRange columns) {
    return loader.LoadLinear({.name = prefix + name,
                              .n = n,
                              .k = k,
                              .bias = WeightLoader::Bias::kRequired,
                              .transposed = source.transposed,
                              .rows = std::move(rows),
                              .columns = columns});
  };
  const auto shifted = [&](int64_t by) { return ShardRange{part_.begin + by, part_.end + by}; };
  const Ranges qkv_rows = {part_, shifted(hidden), shifted(2 * hidden)};
  const int64_t ffn = config_.ffn_hidden;
  Layer layer;
  TREADLE_ASSIGN_OR_RETURN(layer.attention_norm, LoadNorm(loader, prefix + names.attention_norm));
  TREADLE_ASSIGN_OR_RETURN(layer.qkv, linear(names.qkv, 3 * hidden, hidden, qkv_rows, {}));
  TREADLE_ASSIGN_OR_RETURN(layer.out, linear(names.out, hidden, hidden, {}, part_));
  TREADLE_ASSIGN_OR_RETURN(layer.ffn_norm, LoadNorm(loader, prefix + names.ffn_norm));
  TREADLE_ASSIGN_OR_RETURN(layer.up, linear(names.up, ffn, hidden, {ffn_}, {}));
  TREADLE_ASSIGN_OR_RETURN(layer.down, linear(names.down, hidden, ffn, {}, ffn_));
  return layer;
}

void Gpt2::ChooseTypes() {
  for (Layer& layer : layer_weights_) {
    layer.qkv_type = InputTypeOf(backend_, {&layer.qkv});
    layer.out_type = InputTypeOf(backend_, {&layer.out});
    layer.up_type = InputTypeOf(backend_, {&layer.up});
    layer.down_type = InputTypeOf(backend_, {&layer.down});
  }
  if (last_stage()) head_type_ = InputTypeOf(backend_, {&head()});
}

absl::Status Gpt2::AllocateActivations(const LoadOptions& options) {
  activations_ = std::make_unique<Activations>(backend_, options.max_batch_tokens);
  const bool inner = std::ranges::any_of(
      layer_weights_, [](const Layer& layer) { return layer.down_type != DType::kF32; });
  const int64_t freed =
      std::max(inner ? options.max_batch_tokens * ffn_.size() : 0,
               head_type_ != DType::kF32 ? options.max_head_rows * config_.hidden : 0);
  TREADLE_RETURN_IF_ERROR(activations_->AddTogether(
      {{&normed_, config_.hidden}, {&qkv_, 3 * part_.size()}}, 2 * freed));
  TREADLE_ASSIGN_OR_RETURN(attended_, activations_->Add(part_.size()));
  TREADLE_ASSIGN_OR_RETURN(up_, activations_->Add(ffn_.size()));
  TREADLE_RETURN_IF_ERROR(sums_.Allocate(*activations_, config_.hidden, shard_));
  activation_bytes_ = activations_->bytes();
  return absl::OkStatus();
}

absl::Status Gpt2::Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                           Tensor hidden) {
  TREADLE_CHECK((ranks == nullptr) == (shard_.size == 1));
  if (first_stage()) {
    TREADLE_RETURN_IF_ERROR(
        sums_.Embed(backend_, embedding_, vocab_, batch.token_ids, ranks, hidden));
    backend_.Embed(positions_.weight(), batch.positions, /*first_id=*/0, /*accumulate=*/true,
                   hidden);
  }
  for (size_t i = 0; i < layer_weights_.size(); ++i) {
    const Layer& layer = layer_weights_[i];
    const KvView view = {kv.layout, kv.layers[i], batch.sequences};
    TREADLE_RETURN_IF_ERROR(Attend(layer, view, ranks, hidden));
    TREADLE_RETURN_IF_ERROR(FeedForward(layer, ranks, hidden));
  }
  return absl::OkStatus();
}

// hidden += W_o attention(W_qkv norm(hidden)).
absl::Status Gpt2::Attend(const Layer& layer, const KvView& kv, Communicator* ranks,
                          Tensor hidden) {
  const int64_t rows = hidden.rows;
  const int64_t size = part_.size();
  const Tensor normed = RowsAs(layer.qkv_type, normed_, rows);      // [num_tokens, hidden]
  const Tensor qkv = qkv_.Rows(0, rows);                            // [num_tokens, 3 * size]
  const Tensor q = qkv.Cols(0, size);                               // [num_tokens, size]
  const Tensor k = qkv.Cols(size, size);                            // [num_tokens, size]
  const Tensor v = qkv.Cols(2 * size, size);                        // [num_tokens, size]
  const Tensor attended = RowsAs(layer.out_type, attended_, rows);  // [num_tokens, size]
  ApplyNorm(layer.attention_norm, hidden, normed);
  const Projection fused[] = {layer.qkv.To(qkv)};
  backend_.MatMul(normed, fused);
  backend_.RotateAndStoreKv(q, k, v, nullptr, kv);
  backend_.Attention(q, kv, 1 / std::sqrt(static_cast<float>(config_.head_dim)), attended);
  return sums_.Add(backend_, layer.out, attended, ranks, hidden);
}

// hidden += W_down gelu(W_up norm(hidden)).
absl::Status Gpt2::FeedForward(const Layer& layer, Communicator* ranks, Tensor hidden) {
  const int64_t rows = hidden.rows;
  const Tensor normed = RowsAs(layer.up_type, normed_, rows);  // [num_tokens, hidden]
  const Tensor up = up_.Rows(0, rows);                         // [num_tokens, ffn_hidden]
  const Tensor inner = layer.down_type == DType::kF32          // [num_tokens, ffn_hidden]
                           ? up
                           : Freed(layer.down_type, rows, ffn_.size());
  ApplyNorm(layer.ffn_norm, hidden, normed);
  const Projection first[] = {layer.up.To(up)};
  backend_.MatMul(normed, first);
  backend_.Gelu(up, inner);
  return sums_.Add(backend_, layer.down, inner, ranks, hidden);
}

void Gpt2::Head(Tensor hidden, Tensor logits) {
  const Tensor normed =
      head_type_ == DType::kF32 ? hidden : Freed(head_type_, hidden.rows, hidden.cols);
  ApplyNorm(norm_, hidden, normed);
  const Projection out[] = {head().To(logits)};
  backend_.MatMul(normed, out);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadGpt2(const Checkpoint& checkpoint, Backend& backend,
                                                const LoadOptions& options) {
  auto model = std::make_unique<Gpt2>(backend);
  TREADLE_RETURN_IF_ERROR(model->Load(checkpoint, options));
  return model;
}

}  // namespace treadle
