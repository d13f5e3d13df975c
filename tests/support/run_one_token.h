// Whether what lies there opens, loads and runs.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/reference/reference_backend.h"
#include "models/checkpoints/checkpoint.h"
#include "models/model.h"

namespace treadle {

// Loads the checkpoint's model and runs one token through it. Its context is cut, so that a cache
// is small whatever the model says.
inline absl::Status RunOneToken(const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  const auto backend = CreateReferenceBackend();
  LoadOptions options;
  options.max_batch_tokens = 1;
  options.threads = 1;
  options.max_context = std::min<int64_t>(config.context, 16);
  TREADLE_ASSIGN_OR_RETURN(const auto model, Model::Load(checkpoint, *backend, options));
  const int32_t token = 0, position = 0, page = 0;
  const SequenceSpan sequence = {0, 1, 0, &page};
  KvLayout layout = {config.kv_heads, config.head_dim, 16, 1, DType::kF32};
  layout.latent_dim = config.latent_dim;
  const KvLayout window_layout = {config.KvHeads(/*local=*/true), config.HeadDim(/*local=*/true),
                                  16, 1, DType::kF32};
  const int64_t each = std::max(layout.PageBytes(), window_layout.PageBytes());
  std::vector<std::byte> memory(static_cast<size_t>(config.layers * each));
  std::vector<std::byte*> layers;
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(memory.data() + config.KvSource(i) * each);
  }
  std::vector<float> hidden(static_cast<size_t>(config.hidden));
  std::vector<float> logits(static_cast<size_t>(config.vocab));
  const Tensor row = DenseTensor(hidden.data(), DType::kF32, 1, config.hidden);
  TREADLE_RETURN_IF_ERROR(model->Forward({{&token, 1}, {&position, 1}, {&sequence, 1}},
                                         {layout, layers, window_layout}, nullptr, row));
  model->Head(row, DenseTensor(logits.data(), DType::kF32, 1, config.vocab));
  return absl::OkStatus();
}

}  // namespace treadle
