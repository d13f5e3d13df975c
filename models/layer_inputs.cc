// The work of a decoder before its layers: embeddings, also those of each layer (Gemma 3n, Gemma
// Team 2025: per-layer embeddings), and norms and slopes that no file holds.
#include <bit>
#include <cmath>

#include "base/status.h"
#include "models/decoder.h"

namespace treadle {
namespace {

// Powers of 2^(-8 / n) for n heads; where n is no power of two, those for the next lower one, and
// then every other one of those for the next higher one (Press et al. 2022, their code's note).
std::vector<float> AlibiSlopes(int64_t heads) {
  const auto lower = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(heads)));
  std::vector<float> slopes;
  for (int64_t i = 1; i <= heads; ++i) {
    const auto power = static_cast<double>(i <= lower ? i : 2 * (i - lower) - 1);
    const auto of = static_cast<double>(i <= lower ? lower : 2 * lower);
    slopes.push_back(static_cast<float>(std::exp2(-8 * power / of)));
  }
  return slopes;
}

}  // namespace

// Loads the slopes of this rank's heads.
absl::Status Decoder::LoadSlopes() {
  const std::vector<float> all = AlibiSlopes(config_.heads);
  const auto bytes = static_cast<size_t>(heads_.size()) * sizeof(float);
  TREADLE_ASSIGN_OR_RETURN(slopes_, backend_.Allocate(bytes));
  backend_.CopyToDevice(slopes_.data(), all.data() + heads_.begin, bytes);
  return absl::OkStatus();
}

// The embedding's factor, in a residual stream that may be kept divided.
absl::Status Decoder::LoadScale() {
  if (EmbeddingScale() == 1) return absl::OkStatus();
  TREADLE_ASSIGN_OR_RETURN(outside_.embedding_scale, Factor(EmbeddingScale()));
  return absl::OkStatus();
}

// An epsilon beside which the mean square of a row is rounded away makes a norm divide all rows
// alike, by the epsilon's root.
absl::StatusOr<Norm> Decoder::Factor(double factor) {
  Norm norm = {.epsilon = 0x1p100f, .cols = config_.hidden, .gain = {}, .bias = {}};
  const std::vector<float> gains(static_cast<size_t>(norm.cols),
                                 static_cast<float>(factor * 0x1p50));
  const size_t bytes = gains.size() * sizeof(float);
  TREADLE_ASSIGN_OR_RETURN(norm.gain, backend_.Allocate(bytes));
  backend_.CopyToDevice(norm.gain.data(), gains.data(), bytes);
  return norm;
}

absl::Status Decoder::LoadUnitNorms(size_t index) {
  const ModelConfig& config = shapes_[index].config;
  LayerWeights& weights = layer_weights_[index];
  if (!weights.k.loaded()) return absl::OkStatus();  // values are an earlier layer's
  const std::vector<float> ones(static_cast<size_t>(config.head_dim), 1.0f);
  const size_t bytes = ones.size() * sizeof(float);
  const auto load = [&](Norm& norm) -> absl::Status {
    norm.epsilon = config.norm_epsilon;
    norm.cols = config.head_dim;
    TREADLE_ASSIGN_OR_RETURN(norm.gain, backend_.Allocate(bytes));
    backend_.CopyToDevice(norm.gain.data(), ones.data(), bytes);
    return absl::OkStatus();
  };
  if (architecture_->values_normalized) TREADLE_RETURN_IF_ERROR(load(weights.v_norm));
  const bool rotates = config.Rotates(layers_.begin + static_cast<int64_t>(index));
  if (!architecture_->unit_head_norms || !config.head_norms || !rotates) return absl::OkStatus();
  TREADLE_RETURN_IF_ERROR(load(weights.q_norm));
  return load(weights.k_norm);
}

absl::Status Decoder::Embed(const Batch& batch, Communicator* ranks, Tensor out) {
  adapters_.Sort(batch.adapters);
  TREADLE_RETURN_IF_ERROR(
      sums_.Embed(backend_, outside_.embedding, vocab_, batch.token_ids, ranks, out));
  adapters_.AddEmbedding(backend_, batch.token_ids, attended_.Rows(0, out.rows), out);
  adapters_.ReplaceEmbedding(backend_, batch.positions, out);
  if (outside_.positions.loaded()) {
    backend_.Embed(outside_.positions.weight(), batch.positions,
                   static_cast<int32_t>(-architecture_->position_offset), /*accumulate=*/true, out);
  }
  for (const Norm* norm : {&outside_.embedding_norm, &outside_.embedding_scale}) {
    if (norm->loaded()) norm->Apply(backend_, out, out);
  }
  return absl::OkStatus();
}

// A layer's input is (norm(P h / sqrt(hidden)) + E sqrt(d)) / sqrt(2), h the embedding, P h and E
// the layer's d features of the projection and of the table. It is kept divided by sqrt(d / 2), and
// P h multiplied by sqrt(hidden): the norms that follow have gains and epsilons that make up for it
// (LoadTensor).
absl::Status Decoder::MakeLayerInputs(const Batch& batch, Communicator* ranks, Tensor hidden) {
  Tensor embedded = hidden;
  if (!first_stage()) {
    embedded = normed_.Rows(0, hidden.rows);
    TREADLE_RETURN_IF_ERROR(Embed(batch, ranks, embedded));
  }
  const Tensor inputs = layer_inputs_.Rows(0, hidden.rows);
  const Projection product[] = {outside_.layer_input_projection.To(inputs)};
  backend_.MatMul(embedded, product);
  const Tensor each =
      DenseTensor(inputs.data, DType::kF32, inputs.rows * config_.layers, config_.layer_embedding);
  outside_.layer_input_norm.Apply(backend_, each, each);
  backend_.Embed(outside_.layer_embedding.weight(), batch.token_ids, 0, /*accumulate=*/true,
                 inputs);
  return absl::OkStatus();
}

}  // namespace treadle
