// Layers that keep a state: their weights, and their half of a layer.
#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "models/decoder.h"
#include "models/tensor_parallel.h"

namespace treadle {

absl::Status LayerPass::AddState(const LayerWeights& w, Tensor x) const {
  const auto convolve = [&](bool silu) {
    backend.Convolve(state_in, Values(w.convolution), Values(w.convolution_bias), silu, kv,
                     state_in);
  };
  if (architecture.states == StateKind::kConvolution) {
    // hidden += W_out (c * convolution(b * W_x x)), with gates b = W_b x and c = W_c x.
    MatMul(x,
           {w.state_input.To(state_in), w.state_beta.To(state_beta), w.state_gate.To(state_gate)});
    backend.Multiply(state_beta, state_in, state_in);
    convolve(/*silu=*/false);
    backend.Multiply(state_gate, state_in, state_out);
    return AddProduct(w.state_output, state_out);
  }
  if (architecture.states == StateKind::kMamba2) {
    // hidden += W_out norm(state read * silu(W_z x)), the norm of each key head's.
    MatMul(x, {w.state_input.To(state_in), w.state_gate.To(state_gate),
               w.state_decay.To(state_decay)});
    convolve(/*silu=*/true);
    backend.GatedDelta(state_in, state_decay, Tensor(), Values(w.decay_rates),
                       Values(w.decay_biases), Values(w.state_skips), kv, state_out);
    backend.SwiGlu(state_gate, state_out, state_out);
    TREADLE_RETURN_IF_ERROR(NormalizeState(w.state_norm));
    return AddProduct(w.state_output, state_out);
  }
  // hidden += W_out (norm(state read) * silu(W_z x)), in each value head.
  MatMul(x, {w.state_input.To(state_in), w.state_gate.To(state_gate), w.state_beta.To(state_beta),
             w.state_decay.To(state_decay)});
  convolve(/*silu=*/true);
  backend.GatedDelta(state_in, state_decay, state_beta, Values(w.decay_rates),
                     Values(w.decay_biases), nullptr, kv, state_out);
  NormalizeHeads(w.state_norm, state_out);
  backend.SwiGlu(state_gate, state_out, state_out);
  return AddProduct(w.state_output, state_out);
}

absl::Status LayerPass::NormalizeState(const Norm& by) const {
  const auto normalize = [&](Tensor of_key_head, int64_t first) {
    backend.RmsNorm(of_key_head, Values(by.gain) + first, by.epsilon, /*accumulate=*/false,
                    of_key_head);
  };
  const int64_t own = state_out.cols;
  if (own < by.cols) {  // a part of a key head's
    TREADLE_RETURN_IF_ERROR(sums.Gather(backend, *ranks, state_out, state_all));
    const int64_t first = ranks->rank() * own;
    normalize(state_all.Cols(first / by.cols * by.cols, by.cols), 0);
    backend.Copy(state_all.Cols(first, own), state_out);
    return absl::OkStatus();
  }
  for (int64_t i = 0; i < own; i += by.cols) normalize(state_out.Cols(i, by.cols), i);
  return absl::OkStatus();
}

// Value heads that take turns are in as many ranges as a key head has of them. Channels of a
// convolution are heads by themselves.
std::vector<ShardRange> Decoder::ValueHeads() const {
  if (!config_.tiled_states || shard_.size == 1) return {PartOf(config_.state_heads, 1, shard_)};
  const int64_t all = config_.StateUnits(), group = config_.state_heads / all;
  const ShardRange units = PartOf(all, 1, shard_);
  std::vector<ShardRange> heads;
  for (int64_t i = 0; i < group; ++i) heads.push_back({i * all + units.begin, i * all + units.end});
  return heads;
}

std::vector<ShardRange> Decoder::ChannelParts() const {
  const ShardRange keys = StateKeyHeads(config_, shard_);
  const int64_t dim = config_.state_key_dim, all = config_.state_key_heads * dim;
  std::vector<ShardRange> parts;
  if (all > 0) {
    parts = {{keys.begin * dim, keys.end * dim}, {all + keys.begin * dim, all + keys.end * dim}};
  }
  for (const ShardRange& heads : ValueHeads()) {
    parts.push_back({2 * all + heads.begin * config_.state_value_dim,
                     2 * all + heads.end * config_.state_value_dim});
  }
  return parts;
}

std::vector<ShardRange> Decoder::StatePartsOf(Extent extent) const {
  if (extent == Extent::kChannels) return ChannelParts();
  if (extent == Extent::kStateHeads) return ValueHeads();
  std::vector<ShardRange> parts;
  if (extent == Extent::kStateValues) {
    for (const ShardRange& heads : ValueHeads()) {
      parts.push_back({heads.begin * config_.state_value_dim, heads.end * config_.state_value_dim});
    }
  }
  if (extent == Extent::kBetaDecay) {
    const ShardRange heads = ValueHeads()[0];
    parts = {heads, {config_.state_heads + heads.begin, config_.state_heads + heads.end}};
  }
  if (extent == Extent::kStateProducts) {
    parts = ChannelParts();
    int64_t first = SizeOf(Extent::kChannels, config_);
    for (const Extent next : {Extent::kStateValues, Extent::kStateHeads}) {
      const ShardRange own = StatePartsOf(next)[0];
      parts.push_back({first + own.begin, first + own.end});
      first += SizeOf(next, config_);
    }
  }
  return parts;
}

absl::Status Decoder::LoadStateVector(WeightLoader& loader, const Checkpoint& checkpoint,
                                      const TensorRow& row, const std::string& name,
                                      LayerWeights& weights) {
  const bool convolution = row.part == Part::kConvolution, bias = name.ends_with(".bias");
  const bool matrix = convolution && !bias;
  const int64_t n = SizeOf(row.rows, config_), taps = matrix ? config_.conv_taps : 1;
  TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, matrix ? checkpoint.Require(name, {n, taps})
                                                              : checkpoint.Require(name, {n}));
  const std::vector<float> stored = DecodeVector(*tensor);
  const std::vector<int32_t> order = FileRowOrder(row, config_, checkpoint.kind());
  std::vector<float> own;
  for (int64_t tap = 0; tap < taps; ++tap) {
    for (const ShardRange& part : StatePartsOf(row.rows)) {
      for (int64_t i = part.begin; i < part.end; ++i) {
        const int64_t at = order.empty() ? i : order[static_cast<size_t>(i)];
        own.push_back(stored[static_cast<size_t>(at * taps + tap)]);
      }
    }
  }
  const bool logarithms = checkpoint.kind() != Checkpoint::Kind::kGguf;
  for (float& value : own) {
    if (row.part == Part::kDecayRate) value = logarithms ? std::exp(value) : std::fabs(value);
  }
  Buffer& vector = convolution && bias            ? weights.convolution_bias
                   : convolution                  ? weights.convolution
                   : row.part == Part::kDecayRate ? weights.decay_rates
                   : row.part == Part::kDecayBias ? weights.decay_biases
                                                  : weights.state_skips;
  TREADLE_ASSIGN_OR_RETURN(vector, loader.Upload(own));
  return absl::OkStatus();
}

absl::Status Decoder::AllocateStates() {
  const StateLayout state = state_layout();
  if (!state.present()) return absl::OkStatus();
  const int64_t heads = state.heads > 0 ? state.heads : state.channels;
  const int64_t values = heads * config_.state_value_dim;
  TREADLE_ASSIGN_OR_RETURN(state_in_, activations_->Add(state.channels));
  TREADLE_ASSIGN_OR_RETURN(state_gate_, activations_->Add(values));
  TREADLE_ASSIGN_OR_RETURN(state_out_, activations_->Add(values));
  if (architecture_->states == StateKind::kMamba2 &&
      state.key_heads * shard_.size > config_.state_key_heads) {
    TREADLE_ASSIGN_OR_RETURN(state_all_, activations_->Add(SizeOf(Extent::kStateValues, config_)));
    TREADLE_RETURN_IF_ERROR(sums_.AllocateGather(*activations_, state_all_.cols));
  }
  if (architecture_->states != StateKind::kMamba2) {
    TREADLE_ASSIGN_OR_RETURN(state_beta_, activations_->Add(heads));
  }
  if (architecture_->states != StateKind::kConvolution) {
    TREADLE_ASSIGN_OR_RETURN(state_decay_, activations_->Add(heads));
  }
  return absl::OkStatus();
}

}  // namespace treadle
