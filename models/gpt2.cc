#include "models/gpt2.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "kernels/status.h"
#include "models/activations.h"
#include "models/weight_loader.h"

namespace treadle {
namespace {

// Names without ".weight" and ".bias"; a layer's are LAYERS + index + "." + name.
struct Names {
  const char *embedding, *positions, *layers, *attention_norm, *qkv, *out, *ffn_norm, *up, *down,
      *norm, *head;
};
constexpr Names kGgufNames = {"token_embd", "position_embd", "blk.",     "attn_norm",
                              "attn_qkv",   "attn_output",   "ffn_norm", "ffn_up",
                              "ffn_down",   "output_norm",   "output"};
constexpr Names kHuggingFaceNames = {"wte",         "wpe",         "h.",     "ln_1",
                                     "attn.c_attn", "attn.c_proj", "ln_2",   "mlp.c_fc",
                                     "mlp.c_proj",  "ln_f",        "lm_head"};

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
  void Forward(const Batch& batch, const KvPages& kv, Tensor hidden) override;
  void Head(Tensor hidden, Tensor logits) override;

 private:
  struct Layer {
    Norm attention_norm;
    Linear qkv;  // [3 * hidden, hidden]: Q, K, V
    Linear out;  // [hidden, hidden]
    Norm ffn_norm;
    Linear up;    // [ffn_hidden, hidden]
    Linear down;  // [hidden, ffn_hidden]
  };
  // Where a file's tensors are, and how its matrices lie (Conv1D keeps [k, n]).
  struct Source {
    Names names;
    std::string prefix;
    bool transposed = false;
  };

  absl::StatusOr<Norm> LoadNorm(WeightLoader& loader, const std::string& name) const;
  absl::StatusOr<Layer> LoadLayer(WeightLoader& loader, const Source& source, int64_t index) const;
  absl::Status LoadEnds(WeightLoader& loader, const Source& source);
  absl::Status AllocateActivations(int64_t max_batch_tokens);
  void ApplyNorm(const Norm& norm, Tensor x, Tensor out) const {
    backend_.LayerNorm(x, Values(norm.weight), Values(norm.bias), config_.norm_epsilon, out);
  }
  void Attend(const Layer& layer, const KvView& kv, Tensor hidden);
  void FeedForward(const Layer& layer, Tensor hidden);

  // Constant after Load.
  Backend& backend_;
  Linear embedding_;  // [vocab, hidden]; first stage, and the head if tied
  Linear positions_;  // [context, hidden], first stage
  std::vector<Layer> layer_weights_;
  Norm norm_;    // last stage
  Linear head_;  // [vocab, hidden], last stage, unless tied

  // Confined to the rank's thread. All f32, rows = max_batch_tokens.
  std::unique_ptr<Activations> activations_;
  Tensor normed_;    // [num_tokens, hidden]
  Tensor qkv_;       // [num_tokens, 3 * hidden]
  Tensor attended_;  // [num_tokens, hidden]
  Tensor up_;        // [num_tokens, ffn_hidden]
};

absl::Status Gpt2::Load(const Checkpoint& checkpoint, const LoadOptions& options) {
  config_ = checkpoint.config();
  layers_ = options.layers;
  if (config_.kv_heads != config_.heads || config_.heads * config_.head_dim != config_.hidden) {
    return InvalidArgument(checkpoint.path(), ": gpt2 with ", config_.heads, " heads of ",
                           config_.head_dim, " and ", config_.kv_heads,
                           " K/V heads, expected as many of each, together of size ",
                           config_.hidden);
  }
  const bool gguf = checkpoint.kind() == Checkpoint::Kind::kGguf;
  Source source{gguf ? kGgufNames : kHuggingFaceNames, "", !gguf};
  // Files saved from the bare model have no prefix.
  if (checkpoint.Find("transformer.wte.weight") != nullptr) source.prefix = "transformer.";
  WeightLoader loader(checkpoint, backend_, options);
  TREADLE_RETURN_IF_ERROR(LoadEnds(loader, source));
  for (int64_t i = layers_.begin; i < layers_.end; ++i) {
    TREADLE_ASSIGN_OR_RETURN(Layer layer, LoadLayer(loader, source, i));
    layer_weights_.push_back(std::move(layer));
  }
  weight_bytes_ = loader.weight_bytes();
  TREADLE_RETURN_IF_ERROR(AllocateActivations(options.max_batch_tokens));
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
  const auto table = [&](const char* name, int64_t rows) {
    return loader.LoadLinear({source.prefix + name, rows, config_.hidden});
  };
  if (first_stage() || (last_stage() && config_.tied_head)) {
    TREADLE_ASSIGN_OR_RETURN(embedding_, table(source.names.embedding, config_.vocab));
  }
  if (first_stage()) {
    TREADLE_ASSIGN_OR_RETURN(positions_, table(source.names.positions, config_.context));
  }
  if (!last_stage()) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(norm_, LoadNorm(loader, source.prefix + source.names.norm));
  if (config_.tied_head) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(head_,
                           loader.LoadLinear({source.names.head, config_.vocab, config_.hidden}));
  return absl::OkStatus();
}

absl::StatusOr<Gpt2::Layer> Gpt2::LoadLayer(WeightLoader& loader, const Source& source,
                                            int64_t index) const {
  const Names& names = source.names;
  const std::string prefix = Str(source.prefix, names.layers, index, ".");
  const auto linear = [&](const char* name, int64_t n, int64_t k) {
    return loader.LoadLinear(
        {prefix + name, n, k, WeightLoader::Bias::kRequired, {}, source.transposed});
  };
  const int64_t hidden = config_.hidden;
  Layer layer;
  TREADLE_ASSIGN_OR_RETURN(layer.attention_norm, LoadNorm(loader, prefix + names.attention_norm));
  TREADLE_ASSIGN_OR_RETURN(layer.qkv, linear(names.qkv, 3 * hidden, hidden));
  TREADLE_ASSIGN_OR_RETURN(layer.out, linear(names.out, hidden, hidden));
  TREADLE_ASSIGN_OR_RETURN(layer.ffn_norm, LoadNorm(loader, prefix + names.ffn_norm));
  TREADLE_ASSIGN_OR_RETURN(layer.up, linear(names.up, config_.ffn_hidden, hidden));
  TREADLE_ASSIGN_OR_RETURN(layer.down, linear(names.down, hidden, config_.ffn_hidden));
  return layer;
}

absl::Status Gpt2::AllocateActivations(int64_t max_batch_tokens) {
  activations_ = std::make_unique<Activations>(backend_, max_batch_tokens);
  const std::pair<Tensor*, int64_t> sizes[] = {{&normed_, config_.hidden},
                                               {&qkv_, 3 * config_.hidden},
                                               {&attended_, config_.hidden},
                                               {&up_, config_.ffn_hidden}};
  for (const auto& [tensor, cols] : sizes) {
    TREADLE_ASSIGN_OR_RETURN(*tensor, activations_->Add(cols));
  }
  activation_bytes_ = activations_->bytes();
  return absl::OkStatus();
}

void Gpt2::Forward(const Batch& batch, const KvPages& kv, Tensor hidden) {
  if (first_stage()) {
    backend_.Embed(embedding_.weight(), batch.token_ids, false, hidden);
    backend_.Embed(positions_.weight(), batch.positions, /*accumulate=*/true, hidden);
  }
  for (size_t i = 0; i < layer_weights_.size(); ++i) {
    Attend(layer_weights_[i], {kv.layout, kv.layers[i], batch.sequences}, hidden);
    FeedForward(layer_weights_[i], hidden);
  }
}

// hidden += W_o attention(W_qkv norm(hidden)).
void Gpt2::Attend(const Layer& layer, const KvView& kv, Tensor hidden) {
  const int64_t rows = hidden.rows;
  const int64_t size = config_.hidden;
  const Tensor normed = normed_.Rows(0, rows);      // [num_tokens, hidden]
  const Tensor qkv = qkv_.Rows(0, rows);            // [num_tokens, 3 * hidden]
  const Tensor q = qkv.Cols(0, size);               // [num_tokens, heads * head_dim]
  const Tensor k = qkv.Cols(size, size);            // [num_tokens, heads * head_dim]
  const Tensor v = qkv.Cols(2 * size, size);        // [num_tokens, heads * head_dim]
  const Tensor attended = attended_.Rows(0, rows);  // [num_tokens, hidden]
  ApplyNorm(layer.attention_norm, hidden, normed);
  const Projection fused[] = {layer.qkv.To(qkv)};
  backend_.MatMul(normed, fused);
  backend_.RotateAndStoreKv(q, k, v, nullptr, kv);
  backend_.Attention(q, kv, 1 / std::sqrt(static_cast<float>(config_.head_dim)), attended);
  const Projection out[] = {layer.out.To(hidden, /*accumulate=*/true)};
  backend_.MatMul(attended, out);
}

// hidden += W_down gelu(W_up norm(hidden)).
void Gpt2::FeedForward(const Layer& layer, Tensor hidden) {
  const Tensor normed = normed_.Rows(0, hidden.rows);  // [num_tokens, hidden]
  const Tensor up = up_.Rows(0, hidden.rows);          // [num_tokens, ffn_hidden]
  ApplyNorm(layer.ffn_norm, hidden, normed);
  const Projection first[] = {layer.up.To(up)};
  backend_.MatMul(normed, first);
  backend_.Gelu(up);
  const Projection down[] = {layer.down.To(hidden, /*accumulate=*/true)};
  backend_.MatMul(up, down);
}

void Gpt2::Head(Tensor hidden, Tensor logits) {
  ApplyNorm(norm_, hidden, hidden);
  const Linear& head = config_.tied_head ? embedding_ : head_;
  const Projection out[] = {head.To(logits)};
  backend_.MatMul(hidden, out);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadGpt2(const Checkpoint& checkpoint, Backend& backend,
                                                const LoadOptions& options) {
  auto model = std::make_unique<Gpt2>(backend);
  TREADLE_RETURN_IF_ERROR(model->Load(checkpoint, options));
  return model;
}

}  // namespace treadle
