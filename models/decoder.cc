#include "models/decoder.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/status.h"
#include "models/tensor_parallel.h"

namespace treadle {

void Norm::Apply(Backend& backend, Tensor x, Tensor out, bool accumulate) const {
  if (kind == NormKind::kRms) {
    backend.RmsNorm(x, Values(gain), epsilon, accumulate, out);
  } else {
    TREADLE_CHECK(!accumulate);
    backend.LayerNorm(x, Values(gain), Values(bias), epsilon, out);
  }
}

void LayerPass::NormalizeHeads(const Norm& by, Tensor x) const {
  TREADLE_CHECK(x.stride == x.cols);
  const Tensor heads = DenseTensor(x.data, x.dtype, x.rows * x.cols / by.cols, by.cols);
  by.Apply(backend, heads, heads);
}

// Rotates x as queries are rotated, beside keys of no head, of which nothing is stored.
void LayerPass::RotateAlone(Tensor x, const RotaryTable& by) const {
  const Tensor none = DenseTensor(attended.data, DType::kF32, x.rows, 0);
  KvView nothing = kv;
  nothing.layout.kv_heads = 0;
  backend.RotateAndStoreKv(x, none, none, &by, nothing);
}

void LayerPass::Rotate() const {
  RotateAlone(own_q, *rotary);
  RotateAlone(own_k, *rotary);
}

void LayerPass::Attend() const {
  if (query_scales != nullptr) RotateAlone(own_q, *query_scales);
  if (v.data != nullptr) {
    backend.RotateAndStoreKv(own_q, own_k, v, architecture.norms_after_rotation ? nullptr : rotary,
                             kv);
  } else if (rotary != nullptr) {
    RotateAlone(own_q, *rotary);
  }
  const int64_t scalar = config.query_scalar > 0 ? config.query_scalar : config.head_dim;
  const float scale = config.attention_multiplier > 0
                          ? static_cast<float>(config.attention_multiplier)
                          : 1 / std::sqrt(static_cast<float>(scalar));
  backend.Attention(own_q, kv, scale, attended);
}

void LayerPass::MatMul(Tensor x, std::initializer_list<LinearProduct> products) const {
  adapters.MatMul(backend, x, std::span(products.begin(), products.size()));
}

void LayerPass::GatedMatMul(Tensor x, const Linear& by_gate, const Linear& by_up, Backend::Gate by,
                            Tensor out) const {
  const LinearProduct pair[] = {by_gate.To(gate), by_up.To(up)};
  adapters.GatedMatMul(backend, x, pair, by, gate, up, out);
}

absl::Status LayerPass::AddProduct(const Linear& linear, Tensor x, const Norm& by) const {
  // This rank holds a part of W's columns and of x's features, and rank 0 the bias.
  const auto part = [&](Tensor rows, bool add) { MatMul(x, {linear.To(rows, add)}); };
  if (!by.loaded()) return sums.Sum(ranks, /*accumulate=*/true, hidden, part);
  TREADLE_RETURN_IF_ERROR(sums.Sum(ranks, /*accumulate=*/false, half, part));
  by.Apply(backend, half, hidden, /*accumulate=*/true);
  return absl::OkStatus();
}

absl::Status LayerPass::RunExperts(const LayerWeights& w, Tensor routed, Tensor x) const {
  const Routing routing = {.sigmoid = architecture.sigmoid_router,
                           .normalize = config.normalized_experts,
                           .scale = static_cast<float>(config.expert_scale),
                           .bias = Values(w.router_bias),
                           .expert_scales = Values(w.expert_scales),
                           .groups = std::max<int64_t>(config.expert_groups, 1),
                           .used_groups = std::max<int64_t>(config.used_expert_groups, 1)};
  TREADLE_RETURN_IF_ERROR(experts.Route(backend, w.router, routing, routed, adapters, expert_use));
  experts.Run(backend, w.expert_gate, w.expert_up, w.expert_down, x);
  return absl::OkStatus();
}

absl::Status LayerPass::AddExperts(const LayerWeights& w) const {
  TREADLE_RETURN_IF_ERROR(RunExperts(w, ffn_in, ffn_in));
  const bool shared = w.shared_up.loaded();
  if (w.shared_gate.loaded()) {
    // gate = sigmoid(w_s x) silu(W_gate x) * W_up x
    GatedMatMul(ffn_in, w.shared_gate, w.shared_up, Backend::Gate::kSwiGlu, gate);
  } else if (shared) {  // gate = max(W_up x, 0)^2
    MatMul(ffn_in, {w.shared_up.To(gate)});
    SquaredRelu(backend, gate, gate);
  }
  if (w.shared_router.loaded()) {
    MatMul(ffn_in, {w.shared_router.To(shared_scale)});
    backend.SigmoidGate(shared_scale, gate, gate);
  }
  return sums.Sum(ranks, /*accumulate=*/true, hidden, [&](Tensor rows, bool add) {
    experts.Mix(backend, add, rows);
    if (shared) MatMul(gate, {w.shared_down.To(rows, /*accumulate=*/true)});
  });
}

absl::Status Decoder::AllocateActivations(const LoadOptions& options) {
  activations_ = std::make_unique<Activations>(backend_, options.max_batch_tokens);
  // The most that a layer has.
  const auto most = [&](auto size) {
    int64_t largest = 0;
    for (size_t i = 0; i < shapes_.size(); ++i) {
      largest = std::max<int64_t>(largest, size(shapes_[i], weights(i)));
    }
    return largest;
  };
  const auto rows_of = [](const Linear& linear) {
    return linear.loaded() ? linear.weight().n() : 0;
  };
  const int64_t q_size =
      most([&](const auto& s, const auto&) { return heads_.size() * s.config.head_dim; });
  const int64_t kv_size = most([](const auto& s, const auto&) {
    return s.config.latent_dim > 0 ? 0 : s.kv_heads.size() * s.config.head_dim;
  });
  const int64_t expert_size = most(
      [](const auto& s, const auto& w) { return w.router.loaded() ? s.ffn.size() : int64_t{0}; });
  const int64_t inner_size = most([](const auto& s, const auto& w) {
    return w.shared_up.loaded() ? s.shared.size() : s.ffn.size();
  });
  const auto any = [&](auto asks) { return std::ranges::any_of(owner().layer_weights_, asks); };
  const bool inner = any([](const auto& layer) { return layer.down_type != DType::kF32; });
  const bool fused = any([](const auto& layer) { return layer.qkv.loaded(); });
  const bool gated =
      any([](const auto& layer) { return layer.gate.loaded() || layer.shared_gate.loaded(); });
  const bool halves = any([](const auto& layer) { return layer.post_ffn_norm.loaded(); });
  const int64_t freed =
      2 * std::max(inner ? options.max_batch_tokens * inner_size : 0,
                   outside_.head_type != DType::kF32 ? options.max_head_rows * config_.hidden : 0);
  if (fused) {
    TREADLE_RETURN_IF_ERROR(activations_->AddTogether(
        {{&normed_, config_.hidden}, {&qkv_, q_size + 2 * kv_size}}, freed));
    q_ = qkv_.Cols(0, q_size);
    k_ = qkv_.Cols(q_size, kv_size);
    v_ = qkv_.Cols(q_size + kv_size, kv_size);
  } else {
    TREADLE_RETURN_IF_ERROR(activations_->AddTogether(
        {{&normed_, config_.hidden},
         {&q_, most([&](const auto&, const auto& w) { return rows_of(w.q); })},
         {&k_, most([&](const auto&, const auto& w) { return rows_of(w.k); })},
         {&v_, kv_size}},
        freed));
  }
  TREADLE_ASSIGN_OR_RETURN(attended_, activations_->Add(q_size));
  if (config_.gated_attention) {
    TREADLE_ASSIGN_OR_RETURN(q_gate_, activations_->Add(q_size));
  }
  TREADLE_RETURN_IF_ERROR(AllocateStates());
  TREADLE_RETURN_IF_ERROR(AllocateLatents());
  if (any([](const auto& layer) { return layer.gate_up.loaded(); })) {
    TREADLE_ASSIGN_OR_RETURN(gate_up_, activations_->Add(2 * inner_size));
    gate_ = gate_up_.Cols(0, inner_size);
    up_ = gate_up_.Cols(inner_size, inner_size);
  } else {
    TREADLE_ASSIGN_OR_RETURN(up_, activations_->Add(inner_size));
    gate_ = up_;  // which the activation overwrites
  }
  if (gated) {
    TREADLE_ASSIGN_OR_RETURN(gate_,
                             activations_->Add(std::max(inner_size, config_.layer_embedding)));
  }
  if (halves) {
    TREADLE_ASSIGN_OR_RETURN(half_, activations_->Add(config_.hidden));
  }
  if (config_.layer_embedding > 0) {
    TREADLE_ASSIGN_OR_RETURN(layer_inputs_,
                             activations_->Add(SizeOf(Extent::kLayerInputs, config_)));
  }
  if (config_.experts > 0) {
    TREADLE_RETURN_IF_ERROR(
        experts_.Allocate(*activations_, config_, expert_size, options.max_batch_tokens));
  }
  if (config_.shared_hidden > 0) {
    TREADLE_ASSIGN_OR_RETURN(shared_scale_, activations_->Add(1));
  }
  TREADLE_RETURN_IF_ERROR(sums_.Allocate(*activations_, config_.hidden, shard_));
  activation_bytes_ = activations_->bytes();
  return absl::OkStatus();
}

KvView Decoder::ViewOf(size_t index, const Batch& batch, const KvPages& kv) const {
  KvView view{kv.layout, kv.layers[index], batch.sequences};
  view.slopes = Values(owner().slopes_);
  view.sinks = Values(weights(index).sinks);
  const int64_t layer = layers_.begin + static_cast<int64_t>(index);
  if (!config_.HasRing(layer)) return view;
  view.window = config_.KeepsState(layer) ? kv.layout.page_size + 1 : config_.window;
  if (!batch.window_sequences.empty()) view.sequences = batch.window_sequences;
  if (kv.window_layout.num_pages > 0) view.layout = kv.window_layout;
  return view;
}

LayerPass Decoder::PassOf(size_t index, const KvView& kv, Communicator* ranks, Tensor hidden) {
  const LayerWeights& layer = weights(index);
  const auto& [config, kv_heads, ffn, shared] = shapes_[index];
  const bool apart = kv.window > 0 && config_.local_rope_base > 0;
  const RotaryEmbedding& rotary = apart ? owner().local_rotary_ : owner().rotary_;
  const RotaryEmbedding& query_scales = owner().query_scales_;
  const int64_t rows = hidden.rows;
  // The first columns of a buffer of the widest layer's, as a matrix of its own.
  const auto sized = [rows](const Tensor& all, int64_t cols) {
    return all.cols == cols ? all.Rows(0, rows) : DenseTensor(all.data, all.dtype, rows, cols);
  };
  const int64_t inner = layer.shared_up.loaded() ? shared.size() : ffn.size();
  const Tensor gate = sized(gate_, inner);
  const bool rotates =
      architecture_->rotary && config_.Rotates(layers_.begin + static_cast<int64_t>(index));
  const bool scales = query_scales.bytes() > 0 && (config.query_beta == 0 || !rotates);
  const int64_t dim = config.head_dim;
  const auto made = [&](const Tensor& all, const Linear& by) {
    return by.loaded() ? sized(all, by.weight().n()) : all.Rows(0, rows);
  };
  const auto some = [rows](const Tensor& all) {
    return all.data == nullptr ? Tensor() : all.Rows(0, rows);
  };
  const auto own = [&](const Tensor& all, ShardRange heads) {
    const int64_t cols = heads.size() * dim;
    return all.Cols(all.cols == cols ? 0 : heads.begin * dim, cols);
  };
  const bool latent = config.latent_dim > 0;
  if (latent) OrderByHead(rows);
  const bool has_q = (layer.q.loaded() || layer.qkv.loaded()) && !latent;
  const bool has_kv = layer.k.loaded() || layer.qkv.loaded();
  const Tensor q = made(q_, layer.q), k = has_kv ? made(k_, layer.k) : Tensor();
  return {.backend = backend_,
          .config = config,
          .architecture = *architecture_,
          .rotary = rotates ? &rotary.table() : nullptr,
          .query_scales = scales ? &query_scales.table() : nullptr,
          .sums = sums_,
          .ranks = ranks,
          .kv = kv,
          .hidden = hidden,
          .attention_in = RowsAs(layer.attention_type, normed_, rows),
          .q = q,
          .q_gate = q_gate_.data == nullptr ? Tensor() : sized(q_gate_, heads_.size() * dim),
          .k = k,
          .v = has_kv && !latent ? sized(v_, kv_heads.size() * dim) : Tensor(),
          .own_q = has_q ? own(q, heads_) : Tensor(),
          .own_k = has_kv ? own(k, kv_heads) : Tensor(),
          .qkv = layer.qkv.loaded() ? qkv_.Rows(0, rows) : Tensor(),
          .query_latent = some(query_latent_),
          .latent_q = some(latent_q_),
          .by_head = some(by_head_),
          .values = some(values_),
          .head_rows = head_rows_,
          .attended = DenseTensor(attended_.data, layer.out_type, rows,
                                  heads_.size() * (latent ? config.latent_dim : dim)),
          .ffn_in = RowsAs(layer.ffn_type, normed_, rows),
          .gate = gate,
          .up = sized(up_, inner),
          .shared_scale = some(shared_scale_),
          .gate_up = layer.gate_up.loaded() ? gate_up_.Rows(0, rows) : Tensor(),
          .inner = layer.down_type == DType::kF32 ? gate : Freed(layer.down_type, rows, inner),
          .half = some(half_),
          .layer_input =
              layer_inputs_.data == nullptr
                  ? Tensor()
                  : layer_inputs_.Rows(0, rows).Cols(
                        (layers_.begin + static_cast<int64_t>(index)) * config.layer_embedding,
                        config.layer_embedding),
          .state_in = some(state_in_),
          .state_gate = some(state_gate_),
          .state_out = some(state_out_),
          .state_beta = some(state_beta_),
          .state_decay = some(state_decay_),
          .state_all = some(state_all_),
          .experts = experts_,
          .expert_use = expert_use_,
          .adapters = adapters_};
}

absl::Status Decoder::Forward(const Batch& batch, const KvPages& kv, Communicator* ranks,
                              Tensor hidden) {
  TREADLE_CHECK((ranks == nullptr) == (shard_.size == 1));
  adapters_.Sort(batch.adapters);
  if (first_stage()) TREADLE_RETURN_IF_ERROR(Embed(batch, ranks, hidden));
  if (config_.layer_embedding > 0) {
    TREADLE_RETURN_IF_ERROR(MakeLayerInputs(batch, ranks, hidden));
  }
  expert_use_ = {};
  for (size_t i = 0; i < layer_weights_.size(); ++i) {
    if (observer_) observer_(layers_.begin + static_cast<int64_t>(i));
    TREADLE_RETURN_IF_ERROR(RunLayer(i, batch, kv, ranks, hidden));
  }
  return absl::OkStatus();
}

absl::Status Decoder::RunLayer(size_t index, const Batch& batch, const KvPages& kv,
                               Communicator* ranks, Tensor hidden) {
  const LayerPass pass = PassOf(index, ViewOf(index, batch, kv), ranks, hidden);
  return architecture_->layer(pass, weights(index));
}

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Borrow(const Decoder& lender, Backend& backend,
                                                         int64_t max_batch_tokens) {
  auto decoder = std::make_unique<Decoder>(backend);
  decoder->lender_ = &lender;
  decoder->config_ = lender.config_;
  decoder->architecture_ = lender.architecture_;
  decoder->layers_ = lender.layers_;
  decoder->shard_ = lender.shard_;
  decoder->heads_ = lender.heads_;
  decoder->shapes_ = lender.shapes_;
  LoadOptions options;
  options.max_batch_tokens = max_batch_tokens;
  TREADLE_RETURN_IF_ERROR(decoder->AllocateActivations(options));
  return decoder;
}

void Decoder::Head(Tensor hidden, Tensor logits, std::span<const Adapter* const> adapters) {
  if (observer_) observer_(layers_.end);
  const Tensor normed = outside_.head_type == DType::kF32
                            ? hidden
                            : Freed(outside_.head_type, hidden.rows, hidden.cols);
  const bool divided = outside_.head_norm.loaded();
  (divided ? outside_.head_norm : outside_.output_norm).Apply(backend_, hidden, normed);
  const LinearProduct out[] = {head().To(logits)};
  head_adapters_.Sort(adapters);
  head_adapters_.MatMul(backend_, normed, out);
  if (config_.logits_cap > 0) {
    backend_.SoftCap(logits, static_cast<float>(config_.logits_cap), logits);
  }
}

}  // namespace treadle
