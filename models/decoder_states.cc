// Layers that keep a state: their weights, and their half of a layer.
#include <algorithm>
#include <cmath>

#include "base/status.h"
#include "models/decoder.h"
#include "models/tensor_parallel.h"

namespace treadle {

absl::Status LayerPass::AddState(const LayerWeights& w, Tensor x) const {
  // hidden += W_out (norm(state read) * silu(W_z x)), in each value head.
  MatMul(x, {w.state_input.To(state_in), w.state_gate.To(state_gate), w.state_beta.To(state_beta),
             w.state_decay.To(state_decay)});
  backend.Convolve(state_in, Values(w.convolution), nullptr, /*silu=*/true, kv, state_in);
  backend.GatedDelta(state_in, state_decay, state_beta, Values(w.decay_rates),
                     Values(w.decay_biases), kv, state_out);
  NormalizeHeads(w.state_norm, state_out);
  backend.SwiGlu(state_gate, state_out, state_out);
  return AddProduct(w.state_output, state_out);
}

// Value heads that take turns are in as many ranges as a key head has of them.
std::vector<ShardRange> Decoder::ValueHeads() const {
  const int64_t all = config_.state_key_heads, group = config_.state_heads / all;
  const ShardRange keys = PartOf(all, 1, shard_);
  if (!config_.tiled_states || shard_.size == 1) return {{keys.begin * group, keys.end * group}};
  std::vector<ShardRange> heads;
  for (int64_t i = 0; i < group; ++i) heads.push_back({i * all + keys.begin, i * all + keys.end});
  return heads;
}

std::vector<ShardRange> Decoder::ChannelParts() const {
  const ShardRange keys = PartOf(config_.state_key_heads, 1, shard_);
  const int64_t dim = config_.state_key_dim, all = config_.state_key_heads * dim;
  std::vector<ShardRange> parts = {{keys.begin * dim, keys.end * dim},
                                   {all + keys.begin * dim, all + keys.end * dim}};
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
  return parts;
}

absl::Status Decoder::LoadStateVector(WeightLoader& loader, const Checkpoint& checkpoint,
                                      const TensorRow& row, const std::string& name,
                                      LayerWeights& weights) {
  const bool rates = row.part == Part::kDecayRate;
  TREADLE_ASSIGN_OR_RETURN(
      const StoredTensor* tensor,
      row.part != Part::kConvolution
          ? checkpoint.Require(name, {config_.state_heads})
          : checkpoint.Require(name, {SizeOf(row.rows, config_), config_.conv_taps}));
  const std::vector<float> stored = DecodeVector(*tensor);
  std::vector<float> own;
  if (row.part != Part::kConvolution) {
    const bool logarithms = rates && checkpoint.kind() != Checkpoint::Kind::kGguf;
    for (const ShardRange& heads : ValueHeads()) {
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        const float value = stored[static_cast<size_t>(h)];
        own.push_back(logarithms ? std::exp(value) : rates ? std::fabs(value) : value);
      }
    }
    Buffer& vector = rates ? weights.decay_rates : weights.decay_biases;
    TREADLE_ASSIGN_OR_RETURN(vector, loader.Upload(own));
    return absl::OkStatus();
  }
  for (int64_t tap = 0; tap < config_.conv_taps; ++tap) {
    for (const ShardRange& part : ChannelParts()) {
      for (int64_t c = part.begin; c < part.end; ++c) {
        own.push_back(stored[static_cast<size_t>(c * config_.conv_taps + tap)]);
      }
    }
  }
  TREADLE_ASSIGN_OR_RETURN(weights.convolution, loader.Upload(own));
  return absl::OkStatus();
}

absl::Status Decoder::AllocateStates() {
  const StateLayout state = state_layout();
  if (!state.present()) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(state_in_, activations_->Add(state.channels));
  TREADLE_ASSIGN_OR_RETURN(state_gate_, activations_->Add(state.heads * state.value_dim));
  TREADLE_ASSIGN_OR_RETURN(state_out_, activations_->Add(state.heads * state.value_dim));
  TREADLE_ASSIGN_OR_RETURN(state_beta_, activations_->Add(state.heads));
  TREADLE_ASSIGN_OR_RETURN(state_decay_, activations_->Add(state.heads));
  return absl::OkStatus();
}

}  // namespace treadle
